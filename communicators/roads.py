"""The two roads on which array collectives move arrays: MPI and NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from communicators.buckets import ArraySpec
from communicators.dtypes import Array

if TYPE_CHECKING:
    from communicators.devices.device import NcclDevice
    from communicators.nccl_side import NcclSide
    from communicators.transports.messages import Messenger


class Road(Protocol):
    """Moves whole arrays between ranks. All ranks are inside the same collective."""

    def empty(self, spec: ArraySpec) -> Any:
        """Return a new C-contiguous array to receive into."""

    def broadcast(self, array: Any, root: int, max_buf_len: int | None) -> None:
        """Copy root's array into ``array`` on the other ranks."""

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Any]],
        incoming: Sequence[tuple[int, Any]],
        operation: str,
    ) -> None:
        """Send ``(dest, array)`` pairs and receive into ``(source, array)`` pairs."""


def to_bytes(array: Array) -> Array:
    """Return the bytes of a host array; a view where it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.itemsize == 0:
        return np.empty(0, np.uint8)
    return flat.view(np.uint8)


class MpiRoad:
    """NumPy arrays, as messages of MPI."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger

    def empty(self, spec: ArraySpec) -> Any:
        return np.empty(spec.shape, spec.dtype)

    def broadcast(self, array: Any, root: int, max_buf_len: int | None) -> None:
        self._messenger.broadcast(to_bytes(array), root, max_buf_len)

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Any]],
        incoming: Sequence[tuple[int, Any]],
        operation: str,
    ) -> None:
        self._messenger.exchange(
            [(dest, to_bytes(array)) for dest, array in outgoing],
            [(source, to_bytes(array)) for source, array in incoming],
            operation,
        )


class NcclRoad:
    """Arrays on a device, by NCCL. Results are ready on the current stream.

    Args:
        side: of the communicator; a device has been used.
        device: of the arrays.
    """

    def __init__(self, side: NcclSide, device: NcclDevice) -> None:
        assert side.world is not None
        self._nccl = side.world
        self._side = side
        self._device = device

    def empty(self, spec: ArraySpec) -> Any:
        with self._side.working_on(self._device):
            return self._device.xp.empty(spec.shape, spec.dtype)

    def broadcast(self, array: Any, root: int, max_buf_len: int | None) -> None:
        with self._side.working_on(self._device):
            buffer = self._wrap(array)
            if buffer.nbytes:
                for _ in self._nccl.broadcast(buffer, 0, root):
                    pass
                self._device.wait_for(buffer)

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Any]],
        incoming: Sequence[tuple[int, Any]],
        operation: str,
    ) -> None:
        with self._side.working_on(self._device):
            out = [(dest, self._wrap(array)) for dest, array in outgoing]
            into = [(source, self._wrap(array)) for source, array in incoming]
            self._nccl.exchange(out, into)
            for _, buffer in [*out, *into]:
                # Of what was sent, too: it may be overwritten from now on.
                self._device.wait_for(buffer)

    def allgather(self, array: Any, size: int) -> list[Any]:
        """Return the arrays of all ranks, which have one shape and dtype."""
        with self._side.working_on(self._device):
            rows = self._device.xp.empty((size, *array.shape), array.dtype)
            everything = self._device.wrap(rows)
            if everything.nbytes:
                self._nccl.gather_all(self._wrap(array), everything)
                self._device.wait_for(everything)
            return [rows[i : i + 1].reshape(array.shape) for i in range(size)]

    def _wrap(self, array: Any) -> Any:
        return self._device.wrap(self._device.xp.ascontiguousarray(array))
