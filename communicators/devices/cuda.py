"""A GPU, through CuPy."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import cupy  # type: ignore[import-not-found,unused-ignore]
import numpy as np

from communicators.buckets import Bucket
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.flat_buffer_kernels import (
    FlatBufferKernels,
    pointer_table,
    present_bytes,
    source,
)
from communicators.devices.host import padded
from communicators.dtypes import Array

# Pointer tables that are kept on the device: CuPy's memory pool gives the gradients
# of every step the same addresses, so one table a bucket is the usual case.
_MAX_TABLES = 256

# ``cudaSuccess`` and ``cudaErrorNotReady``.
_SUCCESS, _NOT_READY = 0, 600


class CudaDevice:
    """CuPy arrays on one GPU, which travel by NCCL.

    Everything is enqueued on CuPy's current stream; buffers come from CuPy's memory
    pool, which orders their reuse by stream.

    Args:
        device_id: CUDA's number of the GPU in this process.
    """

    kind = "gpu"
    uses_nccl = True
    xp: ModuleType = cupy

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._device = cupy.cuda.Device(device_id)
        self._tables: OrderedDict[tuple[int, bytes], Any] = OrderedDict()
        self._module: Any = None
        # Pinned memory, and the event after the copy from it.
        self._pinned: list[tuple[Array, Any]] = []
        n_processors = int(self._device.attributes["MultiProcessorCount"])
        #: Counts its launches and bytes.
        self.kernels = FlatBufferKernels(self, n_processors)

    def __str__(self) -> str:
        return f"cuda:{self.device_id}"

    def launch(
        self, kernel_name: str, grid: int, block: int, args: Sequence[int | float]
    ) -> None:
        """Launch a kernel on the current stream; for :class:`FlatBufferKernels`."""
        if self._module is None:
            self._module = cupy.RawModule(code=source())
        typed = [np.float64(a) if isinstance(a, float) else np.int64(a) for a in args]
        self._module.get_function(kernel_name)((grid,), (block,), tuple(typed))

    # -- flat buffers ---

    def take(self, n_elems: int, dtype: np.dtype[Any], n_parts: int) -> DeviceBuffer:
        n_padded = padded(n_elems, dtype.itemsize, n_parts)
        owner = cupy.empty(n_padded * dtype.itemsize, np.uint8)
        return DeviceBuffer(owner, owner.data.ptr, n_padded, dtype)

    def give_back(self, buffer: DeviceBuffer) -> None:
        # CuPy's pool takes the memory back when nobody refers to it any more, and may
        # hand it out on the current stream: NCCL must have been done with it by then.
        self.wait_for(buffer)

    def pack(
        self,
        bucket: Bucket,
        arrays: Sequence[Any],
        buffer: DeviceBuffer,
        scale: float | None = None,
    ) -> None:
        """Pack all arrays of the bucket by one kernel launch."""
        sources = [_contiguous(arrays[index]) for index in bucket.indices]
        table = pointer_table(bucket, [_entry(source) for source in sources])
        self.kernels.pack(
            self._upload(table).data.ptr,
            len(table),
            buffer.pointer,
            buffer.size,
            bucket.dtype,
            scale,
            array_bytes=present_bytes(table, bucket.dtype),
        )

    def unpack(
        self, bucket: Bucket, arrays: Sequence[Any], buffer: DeviceBuffer
    ) -> None:
        """Unpack all arrays of the bucket by one kernel launch."""
        self.wait_for(buffer)
        targets = [arrays[index] for index in bucket.indices]
        contiguous = [
            t if t is None or t.flags.c_contiguous else cupy.empty(t.shape, t.dtype)
            for t in targets
        ]
        table = pointer_table(bucket, [_entry(target) for target in contiguous])
        self.kernels.unpack(
            self._upload(table).data.ptr,
            len(table),
            buffer.pointer,
            buffer.size,
            bucket.dtype,
            array_bytes=present_bytes(table, bucket.dtype),
        )
        for target, copy in zip(targets, contiguous, strict=True):
            if copy is not target:
                target[...] = copy

    def wrap(self, array: Any) -> DeviceBuffer:
        return DeviceBuffer(array, array.data.ptr, array.size, array.dtype)

    def view(self, buffer: DeviceBuffer) -> Any:
        memory = cupy.cuda.UnownedMemory(
            buffer.pointer, buffer.nbytes, buffer.owner, self.device_id
        )
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((buffer.size,), buffer.dtype, pointer)

    # -- order ---

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        device: contextlib.AbstractContextManager[Any] = self._device
        return device

    def create_stream(self) -> Any:
        with self._device:
            return cupy.cuda.Stream(non_blocking=True)

    def stream_pointer(self, stream: Any) -> int:
        return int(stream.ptr)

    def record(self, stream: Any = None) -> Any:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream() if stream is None else stream)
        return event

    def is_done(self, event: Any) -> bool:
        # Not ``event.done``, for which a device that has failed is one that works.
        status = cupy.cuda.runtime.eventQuery(event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise cupy.cuda.runtime.CUDARuntimeError(status)
        return bool(status == _SUCCESS)

    def wait_for(self, buffer: DeviceBuffer, stream: Any = None) -> None:
        stream = cupy.cuda.get_current_stream() if stream is None else stream
        for event in buffer.fence.events():
            stream.wait_event(event)

    def synchronize(self) -> None:
        self._device.synchronize()

    # -- the host's side ---

    def identity(self) -> str:
        return str(cupy.cuda.runtime.deviceGetPCIBusId(self.device_id))

    def host_buffer(self, n_elems: int, dtype: np.dtype[Any]) -> Array:
        nbytes = n_elems * dtype.itemsize
        for i, (host, event) in enumerate(self._pinned):
            if host.size >= nbytes and self.is_done(event):
                del self._pinned[i]
                return host[:nbytes].view(dtype)
        memory = cupy.cuda.alloc_pinned_memory(max(1, nbytes))
        host = np.frombuffer(memory, np.uint8, max(1, nbytes))
        return host[:nbytes].view(dtype)

    def copy_to_host(self, buffer: DeviceBuffer, host: Array) -> Any:
        self.wait_for(buffer)
        self._copy(host.ctypes.data, buffer.pointer, host.nbytes)
        return self.record()

    def copy_from_host(self, host: Array, buffer: DeviceBuffer) -> None:
        self._copy(buffer.pointer, host.ctypes.data, host.nbytes)
        buffer.fence.event = self.record()
        # CuPy's pool of pinned memory knows no streams: it would hand the memory out
        # while it is still being read.
        storage = host if host.base is None else host.base
        self._pinned.append((storage.view(np.uint8), buffer.fence.event))

    # -- parts ---

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(
            target, source, nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr
        )

    def _upload(self, table: Array) -> Any:
        # A copy is ordered before its use on its own stream only.
        key = (int(cupy.cuda.get_current_stream().ptr), table.tobytes())
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.popitem(last=False)
            found = self._tables[key] = cupy.asarray(table)
        else:
            self._tables.move_to_end(key)
        return found


def _contiguous(array: Any) -> Any:
    return array if array is None else cupy.ascontiguousarray(array)


def _entry(array: Any) -> tuple[int, np.dtype[Any]] | None:
    return None if array is None else (int(array.data.ptr), array.dtype)
