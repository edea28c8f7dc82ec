"""NCCL through CuPy's ``cupy.cuda.nccl``."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from communicators.errors import UnavailableError
from communicators.nccl_bindings.interface import (
    NcclBinding,
    NcclCommunicator,
    check_place,
)
from communicators.nccl_bindings.library import (
    INSTALL_LIBRARY,
    NcclLibrary,
    find_loaded,
    version_parts,
)

# NCCL_SPLIT_NOCOLOR
_NO_COLOR = -1

# They take what NCCL's functions take, without the communicator.
_METHODS = {
    "ncclAllReduce": "allReduce",
    "ncclReduce": "reduce",
    "ncclBroadcast": "broadcast",
    "ncclReduceScatter": "reduceScatter",
    "ncclAllGather": "allGather",
    "ncclSend": "send",
    "ncclRecv": "recv",
}


class CupyBinding(NcclBinding):
    """NCCL through CuPy 13 or newer.

    Raises:
        UnavailableError: CuPy or NCCL is missing.
    """

    name = "cupy"

    def __init__(self) -> None:
        self._nccl, cupy_version = _import_nccl()
        # Where several are loaded CuPy calls the first, and so does this.
        handle = find_loaded()
        if handle is None:
            raise UnavailableError(
                f"CuPy {cupy_version} has NCCL, but no shared library of that name"
            )
        super().__init__(NcclLibrary(handle))
        # The id is a tuple of signed chars up to CuPy 13, bytes since.
        self._id_is_bytes = int(cupy_version.partition(".")[0]) >= 14

    @property
    def has_split(self) -> bool:
        # In CuPy since 14, in NCCL since 2.18.
        by_cupy = hasattr(self._nccl.NcclCommunicator, "commSplit")
        return by_cupy and version_parts(self.version) >= (2, 18, 0)

    def create_unique_id(self) -> bytes:
        unique_id = self.call("ncclGetUniqueId", self._nccl.get_unique_id)
        return bytes(char & 0xFF for char in unique_id)

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        check_place(size, unique_id, rank)
        made = self.call(
            "ncclCommInitRank",
            self._nccl.NcclCommunicator,
            size,
            unique_id if self._id_is_bytes else signed_chars(unique_id),
            rank,
        )
        return CupyNcclCommunicator(self, rank, size, made)

    def group_start(self) -> None:
        self.call("ncclGroupStart", self._nccl.groupStart)

    def group_end(self) -> None:
        self.call("ncclGroupEnd", self._nccl.groupEnd)

    def _code_of(self, error: Exception) -> int | None:
        if isinstance(error, self._nccl.NcclError):
            return int(error.status)
        # CuPy looks the code up in a table that ends at 5 or 6, while it makes its
        # exception.
        if isinstance(error, KeyError) and isinstance(error.args[0], int):
            return error.args[0]
        return None


class CupyNcclCommunicator(NcclCommunicator):
    """A communicator of :class:`CupyBinding`.

    CuPy drops what ``ncclCommAbort`` and ``ncclCommDestroy`` return.
    """

    def __init__(self, binding: NcclBinding, rank: int, size: int, comm: Any) -> None:
        super().__init__(binding, rank, size)
        self._comm = comm

    def _invoke(self, name: str, args: Sequence[int], stream: int) -> None:
        getattr(self._comm, _METHODS[name])(*args, stream)

    def _split(self, color: int | None, key: int) -> NcclCommunicator | None:
        made = self._comm.commSplit(_NO_COLOR if color is None else color, key)
        if color is None:
            return None
        return CupyNcclCommunicator(self.binding, made.rank_id(), made.size(), made)

    def _check_async_error(self) -> None:
        self._comm.check_async_error()

    def _abort(self) -> None:
        self._comm.abort()

    def _destroy(self) -> None:
        self._comm.destroy()


def _import_nccl() -> tuple[Any, str]:
    """Return the module ``cupy.cuda.nccl`` and CuPy's version.

    Raises:
        UnavailableError: CuPy is missing, or finds no NCCL that it can use.
    """
    try:
        import cupy
    except ImportError as error:
        raise UnavailableError(
            f"CuPy cannot be imported ({error}); pip install 'chainermn-ng[cuda13]', "
            "or 'chainermn-ng[cuda12]' for CUDA 12, brings it together with NCCL"
        ) from error
    # The module comes without its functions where NCCL is missing, after a warning
    # that some turn into an error. What it lacks is told below.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*nccl library could not be loaded")
        from cupy.cuda import nccl
    if not nccl.available:
        raise UnavailableError(_why_not(cupy.__version__))
    return nccl, cupy.__version__


def _why_not(cupy_version: str) -> str:
    """Return why CuPy has no NCCL: it keeps the exception to itself."""
    try:
        importlib.import_module("cupy_backends.cuda.libs.nccl")
    except ImportError as error:
        if "undefined symbol" in str(error):
            return (
                f"CuPy {cupy_version} needs a newer NCCL than it found ({error}); "
                f"{INSTALL_LIBRARY}"
            )
        return f"CuPy {cupy_version} found no NCCL ({error}); {INSTALL_LIBRARY}"
    return f"CuPy {cupy_version} was imported before NCCL could be loaded"


def signed_chars(unique_id: bytes) -> tuple[int, ...]:
    """Return an id as CuPy before 14 wants it."""
    return tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
