"""What the engine asks of a place where arrays live."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from communicators.buckets import Bucket
from communicators.devices.buffer import DeviceBuffer
from communicators.dtypes import Array

#: NumPy arrays travel by MPI, device buffers by NCCL.
FlatBuffer = Array | DeviceBuffer


class Device(Protocol):
    """Memory of one kind, and the work that is done there.

    Work on a GPU is *enqueued* on the current stream of CuPy; nothing here waits for
    it on the host, unless it says so.

    Attributes:
        kind: ``"cpu"`` or ``"gpu"``.
        uses_nccl: whether flat buffers are :class:`DeviceBuffer`.
        xp: NumPy or CuPy.
    """

    kind: str
    uses_nccl: bool
    xp: ModuleType

    def __str__(self) -> str:
        """Return its name for messages, such as ``cuda:0``."""

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        """Make it the thread's current device for a ``with`` block."""

    def take(self, n_elems: int, dtype: np.dtype[Any], n_parts: int) -> Any:
        """Return a flat buffer of at least ``n_elems``; contents undefined.

        A device buffer may be longer, so that each of ``n_parts`` ranks has an equal
        part that begins at a multiple of 16 bytes.
        """

    def give_back(self, buffer: Any) -> None:
        """Let a flat buffer be used again."""

    def pack(
        self,
        bucket: Bucket,
        arrays: Sequence[Any],
        buffer: Any,
        scale: float | None = None,
    ) -> None:
        """Copy a bucket's arrays into a flat buffer; see :func:`flat_buffer.pack`."""

    def unpack(self, bucket: Bucket, arrays: Sequence[Any], buffer: Any) -> None:
        """Copy a flat buffer into a bucket's arrays, once it is ready."""


class NcclDevice(Device, Protocol):
    """A device whose buffers NCCL takes."""

    def identity(self) -> str:
        """Return what tells it from the other devices of the same host."""

    def wrap(self, array: Any) -> DeviceBuffer:
        """Return a C-contiguous array's memory as a flat buffer."""

    def view(self, buffer: DeviceBuffer) -> Any:
        """Return a flat buffer as a one-dimensional array of :attr:`xp`."""

    def create_stream(self) -> Any:
        """Return a new stream that does not wait for the default stream."""

    def stream_pointer(self, stream: Any) -> int:
        """Return what NCCL takes for a stream."""

    def record(self, stream: Any = None) -> Any:
        """Return an event after all work on a stream, by default the current one."""

    def is_done(self, event: Any) -> bool:
        """Tell whether the work before an event has been done."""

    def wait_for(self, buffer: DeviceBuffer, stream: Any = None) -> None:
        """Let a stream, by default the current one, wait until a buffer is ready."""

    def synchronize(self) -> None:
        """Block the host until all work on the device has been done."""

    def host_buffer(self, n_elems: int, dtype: np.dtype[Any]) -> Array:
        """Return host memory that the device can copy to and from by itself."""

    def copy_to_host(self, buffer: DeviceBuffer, host: Array) -> Any:
        """Enqueue a copy; return the event after it. The host memory is not ready."""

    def copy_from_host(self, host: Array, buffer: DeviceBuffer) -> None:
        """Enqueue a copy; ``host`` must stay as it is until it has been done."""
