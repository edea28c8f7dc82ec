"""How bytes move inside one group of ranks. The only part that imports mpi4py."""

from __future__ import annotations

import importlib
from types import ModuleType

from communicators.errors import UnavailableError


def load(name: str) -> ModuleType:
    """Import one module of this package, at its first use.

    The engine itself can be imported where mpi4py or MPI are missing.

    Args:
        name: ``"messages"``, ``"mpi"`` or ``"progress"``.

    Raises:
        UnavailableError: mpi4py or its MPI library is missing.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise UnavailableError(
            f"mpi4py or its MPI library is missing ({error}); "
            "pip install 'chainermn-ng[mpich]' brings both"
        ) from error
