"""Host memory: plain, and as the memory of an emulated NCCL."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from communicators.buckets import Bucket
from communicators.devices.buffer import DeviceBuffer
from communicators.dtypes import Array
from communicators.flat_buffer import pack, unpack

#: Environment variable: ``host`` says that the NCCL library works on host memory, as
#: the emulator of the tests does. NumPy arrays then travel by NCCL.
NCCL_MEMORY_VARIABLE = "CHAINERMN_NG_NCCL_MEMORY"


def nccl_takes_host_memory() -> bool:
    """Tell whether NumPy arrays are to travel by NCCL.

    Raises:
        ValueError: the environment variable has another value than ``host``.
    """
    value = os.environ.get(NCCL_MEMORY_VARIABLE, "")
    if value not in ("", "host"):
        raise ValueError(
            f"{NCCL_MEMORY_VARIABLE}={value!r}: expected 'host', or leave it out"
        )
    return value == "host"


class HostDevice:
    """NumPy arrays, which travel by MPI.

    Args:
        kept_bytes: buffers of up to this size are used again.
        n_kept: how many of them.
    """

    kind = "cpu"
    uses_nccl = False
    xp: ModuleType = np

    def __init__(self, kept_bytes: int, n_kept: int) -> None:
        self._kept_bytes = kept_bytes
        self._n_kept = n_kept
        self._free: list[Array] = []

    def __str__(self) -> str:
        return "host memory"

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def take(self, n_elems: int, dtype: np.dtype[Any], n_parts: int) -> Any:
        return self._take_bytes(n_elems * dtype.itemsize).view(dtype)

    def give_back(self, buffer: Any) -> None:
        self._keep(buffer.base)

    def pack(
        self,
        bucket: Bucket,
        arrays: Sequence[Array | None],
        buffer: Any,
        scale: float | None = None,
    ) -> None:
        pack(bucket, arrays, buffer, scale)

    def unpack(
        self, bucket: Bucket, arrays: Sequence[Array | None], buffer: Any
    ) -> None:
        unpack(bucket, arrays, buffer)

    def _take_bytes(self, nbytes: int) -> Array:
        for i, storage in enumerate(self._free):
            if storage.size >= nbytes:
                return self._free.pop(i)[:nbytes]
        return np.empty(max(nbytes, self._kept_bytes), np.uint8)[:nbytes]

    def _keep(self, storage: Array) -> None:
        # A buffer for one huge array is not kept: it would double its memory.
        if storage.size <= self._kept_bytes and len(self._free) < self._n_kept:
            self._free.append(storage)


class EmulatedDevice(HostDevice):
    """NumPy arrays, which travel by an NCCL that takes host memory.

    Everything is done when the call that asks for it returns, so events have nothing
    to say, and streams are numbers that the emulator writes down.
    """

    uses_nccl = True
    _stream_numbers = itertools.count(1)

    def __str__(self) -> str:
        return "emulated device"

    def take(self, n_elems: int, dtype: np.dtype[Any], n_parts: int) -> DeviceBuffer:
        n_padded = padded(n_elems, dtype.itemsize, n_parts)
        storage = self._take_bytes(n_padded * dtype.itemsize)
        return DeviceBuffer(storage, storage.ctypes.data, n_padded, dtype)

    def give_back(self, buffer: DeviceBuffer) -> None:
        if buffer.owner.base is not None:
            self._keep(buffer.owner.base)

    def pack(
        self,
        bucket: Bucket,
        arrays: Sequence[Array | None],
        buffer: DeviceBuffer,
        scale: float | None = None,
    ) -> None:
        pack(bucket, arrays, self.view(buffer), scale)

    def unpack(
        self, bucket: Bucket, arrays: Sequence[Array | None], buffer: DeviceBuffer
    ) -> None:
        unpack(bucket, arrays, self.view(buffer))

    def identity(self) -> str:
        return f"process {os.getpid()}"

    def wrap(self, array: Array) -> DeviceBuffer:
        return DeviceBuffer(array, array.ctypes.data, array.size, array.dtype)

    def view(self, buffer: DeviceBuffer) -> Array:
        flat = buffer.owner.reshape(-1).view(np.uint8)
        start = buffer.pointer - flat.ctypes.data
        part: Array = flat[start : start + buffer.nbytes].view(buffer.dtype)
        return part

    def create_stream(self) -> int:
        return next(self._stream_numbers)

    def stream_pointer(self, stream: int) -> int:
        return stream

    def record(self, stream: Any = None) -> Any:
        return self

    def is_done(self, event: Any) -> bool:
        return True

    def wait_for(self, buffer: DeviceBuffer, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def host_buffer(self, n_elems: int, dtype: np.dtype[Any]) -> Array:
        return np.empty(n_elems, dtype)

    def copy_to_host(self, buffer: DeviceBuffer, host: Array) -> Any:
        np.copyto(host, self.view(buffer))
        return self

    def copy_from_host(self, host: Array, buffer: DeviceBuffer) -> None:
        np.copyto(self.view(buffer), host)


def padded(n_elems: int, itemsize: int, n_parts: int) -> int:
    """Return the length of a buffer with ``n_parts`` equal parts of whole 16 bytes.

    One that stays whole stays as it is.
    """
    if n_parts == 1:
        return n_elems
    step = n_parts * max(1, 16 // itemsize)
    return -(-n_elems // step) * step
