"""The emulator (or any libnccl) through ctypes, with NumPy arrays as buffers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import ml_dtypes
import numpy as np

#: NumPy dtypes in the order of ncclDataType_t.
TYPES = [
    np.dtype(name) for name in ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
] + [np.dtype(ml_dtypes.bfloat16)]
#: Operators in the order of ncclRedOp_t.
OPERATORS = ["sum", "prod", "max", "min", "avg"]

SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(
    2, 7
)
NO_COLOR = -1

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_INT_POINTER = ctypes.POINTER(ctypes.c_int)
_COMM_POINTER = ctypes.POINTER(ctypes.c_void_p)


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


_ARGUMENTS = {
    "GetVersion": [_INT_POINTER],
    "GetUniqueId": [ctypes.POINTER(UniqueId)],
    "CommInitRank": [_COMM_POINTER, _INT, UniqueId, _INT],
    "CommInitRankConfig": [_COMM_POINTER, _INT, UniqueId, _INT, _POINTER],
    "CommInitAll": [_COMM_POINTER, _INT, _INT_POINTER],
    "CommSplit": [_POINTER, _INT, _INT, _COMM_POINTER, _POINTER],
    "CommFinalize": [_POINTER],
    "CommDestroy": [_POINTER],
    "CommAbort": [_POINTER],
    "CommGetAsyncError": [_POINTER, _INT_POINTER],
    "CommCount": [_POINTER, _INT_POINTER],
    "CommCuDevice": [_POINTER, _INT_POINTER],
    "CommUserRank": [_POINTER, _INT_POINTER],
    "AllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "Reduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER],
    "Bcast": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "Broadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ReduceScatter": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "AllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "Send": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "Recv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "GroupStart": [],
    "GroupEnd": [],
}


class NcclFailure(Exception):
    """A call returned something else than ncclSuccess."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"nccl{call} returned {code}: {text}")
        self.call = call
        self.code = code
        self.text = text


class Library:
    """A loaded libnccl; each function raises :class:`NcclFailure`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.functions = ctypes.CDLL(os.path.join(folder, "libnccl.so.2"))
        for name, arguments in _ARGUMENTS.items():
            getattr(self.functions, f"nccl{name}").argtypes = arguments
        for name in ["ncclGetErrorString", "ncclGetLastError", "ncclEmulatorMemory"]:
            getattr(self.functions, name).restype = ctypes.c_char_p
        self.functions.ncclGetLastError.argtypes = [_POINTER]

    def call(self, name: str, *args: object) -> None:
        """Call ``nccl<name>``; the GIL is released meanwhile."""
        code = getattr(self.functions, f"nccl{name}")(*args)
        if code != 0:
            text = self.functions.ncclGetLastError(None).decode()
            raise NcclFailure(name, code, text)

    def unique_id(self) -> bytes:
        """Return a new unique id."""
        unique_id = UniqueId()
        self.call("GetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def init(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Join a communicator."""
        handle = ctypes.c_void_p()
        argument = UniqueId.from_buffer_copy(unique_id)
        self.call("CommInitRank", ctypes.byref(handle), size, argument, rank)
        return Communicator(self, handle)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Run the calls inside together, at the end."""
        self.call("GroupStart")
        try:
            yield
        finally:
            self.call("GroupEnd")


def _pointer(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class Communicator:
    """One NCCL communicator; arrays are contiguous, counts are theirs."""

    def __init__(self, library: Library, handle: ctypes.c_void_p) -> None:
        self.library = library
        self.handle = handle
        self.rank = self.value("CommUserRank")
        self.size = self.value("CommCount")

    def call(self, name: str, *args: object) -> None:
        self.library.call(name, *args)

    def value(self, name: str) -> int:
        """Return what a function that takes an ``int *`` writes."""
        value = ctypes.c_int()
        self.call(name, self.handle, ctypes.byref(value))
        return value.value

    def async_error(self) -> int:
        return self.value("CommGetAsyncError")

    def split(self, color: int, key: int) -> Communicator | None:
        handle = ctypes.c_void_p()
        self.call("CommSplit", self.handle, color, key, ctypes.byref(handle), None)
        return Communicator(self.library, handle) if handle.value else None

    def destroy(self) -> None:
        self.call("CommDestroy", self.handle)

    def abort(self) -> None:
        self.call("CommAbort", self.handle)

    def _reduction(self, name, sendbuf, recvbuf, count, op, *root, stream=0):
        code = TYPES.index(sendbuf.dtype), OPERATORS.index(op)
        buffers = _pointer(sendbuf), _pointer(recvbuf)
        self.call(name, *buffers, count, *code, *root, self.handle, stream)

    def all_reduce(self, sendbuf, recvbuf, op="sum", *, stream=0):
        count = sendbuf.size
        self._reduction("AllReduce", sendbuf, recvbuf, count, op, stream=stream)

    def reduce(self, sendbuf, recvbuf, op="sum", root=0):
        self._reduction("Reduce", sendbuf, recvbuf, sendbuf.size, op, root)

    def reduce_scatter(self, sendbuf, recvbuf, op="sum"):
        count = recvbuf.size
        self._reduction("ReduceScatter", sendbuf, recvbuf, count, op)

    def broadcast(self, sendbuf, recvbuf, root=0):
        buffers = _pointer(sendbuf), _pointer(recvbuf)
        code = TYPES.index(recvbuf.dtype)
        self.call("Broadcast", *buffers, recvbuf.size, code, root, self.handle, None)

    def bcast(self, buffer, root=0):
        code = TYPES.index(buffer.dtype)
        self.call("Bcast", _pointer(buffer), buffer.size, code, root, self.handle, None)

    def all_gather(self, sendbuf, recvbuf):
        buffers = _pointer(sendbuf), _pointer(recvbuf)
        code = TYPES.index(sendbuf.dtype)
        self.call("AllGather", *buffers, sendbuf.size, code, self.handle, None)

    def send(self, sendbuf, dest):
        code = TYPES.index(sendbuf.dtype)
        self.call(
            "Send", _pointer(sendbuf), sendbuf.size, code, dest, self.handle, None
        )

    def recv(self, recvbuf, source):
        code = TYPES.index(recvbuf.dtype)
        buffer = _pointer(recvbuf)
        self.call("Recv", buffer, recvbuf.size, code, source, self.handle, None)
