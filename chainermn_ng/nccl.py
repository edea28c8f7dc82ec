"""CuPy's names of NCCL, where CuPy has it: ChainerMN's module of that name.

For scripts that import it. This package itself calls NCCL through
:mod:`communicators.nccl_bindings`.
"""

from __future__ import annotations

try:
    from cupy.cuda.nccl import (
        NCCL_FLOAT,
        NCCL_FLOAT16,
        NCCL_FLOAT32,
        NCCL_FLOAT64,
        NCCL_SUM,
        NcclCommunicator,
        NcclError,
        get_build_version,
        get_unique_id,
        get_version,
    )
except ImportError:
    # No CuPy, or one without NCCL: the names are not there, as in ChainerMN.
    _available = False
    __all__: list[str] = []
else:
    _available = True
    __all__ = [
        "NCCL_FLOAT",
        "NCCL_FLOAT16",
        "NCCL_FLOAT32",
        "NCCL_FLOAT64",
        "NCCL_SUM",
        "NcclCommunicator",
        "NcclError",
        "get_build_version",
        "get_unique_id",
        "get_version",
    ]
