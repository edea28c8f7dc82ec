"""NCCL through the package pynccl, which needs no CuPy."""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from communicators.errors import UnavailableError
from communicators.nccl_bindings.interface import (
    UNIQUE_ID_BYTES,
    NcclBinding,
    NcclCommunicator,
    check_place,
)
from communicators.nccl_bindings.library import NcclLibrary
from communicators.nccl_bindings.search import open_library

# The folder where pynccl looks for the library.
_FOLDER_VARIABLE = "NUMBA_NCCLLIB"

# Where the number of elements is among the arguments.
_COUNT_POSITIONS = {
    "ncclAllReduce": 2,
    "ncclReduce": 2,
    "ncclBroadcast": 2,
    "ncclReduceScatter": 2,
    "ncclAllGather": 2,
    "ncclSend": 1,
    "ncclRecv": 1,
}


class PyncclBinding(NcclBinding):
    """NCCL through pynccl's ``cuNccl``; its ``Nccl`` wants a CUDA context of numba's.

    Raises:
        UnavailableError: pynccl or NCCL is missing.
    """

    name = "pynccl"
    has_split = False

    def __init__(self) -> None:
        self._package = _import_binding()
        # An old library lacks functions that pynccl binds, and would leave it half
        # made for the rest of the process: hence a look before.
        library = NcclLibrary(open_library(_FOLDER_VARIABLE))
        with _folder_for_pynccl(str(pathlib.Path(library.path).parent)):
            try:
                self.api = self._package.cuNccl()._api
            except AttributeError as error:
                raise UnavailableError(
                    f"{library} lacks a function that pynccl needs ({error})"
                ) from error
        # The one that is in use if someone has loaded pynccl's before.
        super().__init__(NcclLibrary(self.api.dll))
        self._codes = {text: code for code, text in self._package.STATUS.items()}
        _widen_counts(self.api.dll)

    def create_unique_id(self) -> bytes:
        unique_id = self._package.ncclUniqueId()
        self.call("ncclGetUniqueId", self.api.ncclGetUniqueId, ctypes.byref(unique_id))
        # pynccl's structure is longer; NCCL fills its beginning.
        return ctypes.string_at(ctypes.byref(unique_id), UNIQUE_ID_BYTES)

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        check_place(size, unique_id, rank)
        # Passed by value. The additional bytes at its end go unread, since no argument
        # that travels in memory comes after it.
        structure = self._package.ncclUniqueId()
        ctypes.memmove(ctypes.byref(structure), unique_id, UNIQUE_ID_BYTES)
        handle = self._package.ncclComm_t()
        self.call(
            "ncclCommInitRank",
            self.api.ncclCommInitRank,
            ctypes.byref(handle),
            size,
            structure,
            rank,
        )
        return PyncclCommunicator(self, rank, size, handle)

    def group_start(self) -> None:
        self.call("ncclGroupStart", self.api.ncclGroupStart)

    def group_end(self) -> None:
        self.call("ncclGroupEnd", self.api.ncclGroupEnd)

    def check(self, code: int) -> None:
        """Raise pynccl's exception for a code other than 0."""
        self.api.check_error(code)

    def _code_of(self, error: Exception) -> int | None:
        if isinstance(error, self._package.NcclV2Error):
            return self._codes[error.args[0]]
        # pynccl looks the code up in a table that ends at 6, while it makes its
        # exception.
        if isinstance(error, KeyError) and isinstance(error.args[0], int):
            return error.args[0]
        return None


class PyncclCommunicator(NcclCommunicator):
    """A communicator of :class:`PyncclBinding`."""

    binding: PyncclBinding

    def __init__(
        self, binding: PyncclBinding, rank: int, size: int, handle: ctypes.c_void_p
    ) -> None:
        super().__init__(binding, rank, size)
        self._handle = handle

    def _invoke(self, name: str, args: Sequence[int], stream: int) -> None:
        getattr(self.binding.api, name)(*args, self._handle, stream)

    def _split(self, color: int | None, key: int) -> NcclCommunicator | None:
        raise NotImplementedError("pynccl has no ncclCommSplit")

    def _check_async_error(self) -> None:
        code = ctypes.c_int()
        self.binding.api.ncclCommGetAsyncError(self._handle, ctypes.byref(code))
        self.binding.check(code.value)

    def _abort(self) -> None:
        self.binding.api.ncclCommAbort(self._handle)

    def _destroy(self) -> None:
        self.binding.api.ncclCommDestroy(self._handle)


class _Count:
    """The type ``size_t`` for the number of elements, which pynccl takes for an int.

    It goes on accepting what ``c_int`` accepts: pynccl's functions are shared by all
    of its users in the process.
    """

    @classmethod
    def from_param(cls, value: Any) -> ctypes.c_size_t:
        return ctypes.c_size_t(getattr(value, "value", value))


def _widen_counts(dll: ctypes.CDLL) -> None:
    for name, position in _COUNT_POSITIONS.items():
        function = getattr(dll, name)
        types = list(function.argtypes)
        types[position] = _Count
        function.argtypes = types


def _import_binding() -> Any:
    """Return the module ``pynccl.binding``.

    Raises:
        UnavailableError: pynccl, or numba that it needs, is missing.
    """
    try:
        import pynccl.binding
    except ImportError as error:
        raise UnavailableError(
            f"pynccl cannot be imported ({error}); "
            "pip install 'chainermn-ng[pynccl]' brings it, "
            "'chainermn-ng[pynccl,cuda13]' or [pynccl,cuda12] with NCCL"
        ) from error
    return pynccl.binding


@contextmanager
def _folder_for_pynccl(folder: str) -> Iterator[None]:
    """Point pynccl to a folder, and leave the environment as it was."""
    before = os.environ.get(_FOLDER_VARIABLE)
    os.environ[_FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER_VARIABLE]
        else:
            os.environ[_FOLDER_VARIABLE] = before
