"""The roads on which array collectives move arrays: MPI, NCCL, or both in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from communicators.buckets import ArraySpec
from communicators.dtypes import Array

if TYPE_CHECKING:
    from communicators.devices.device import Device, NcclDevice
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


class HostRoad:
    """Arrays on a device, through host memory and MPI. For want of NCCL over all ranks.

    Args:
        messenger: of the communicator.
        device: of the arrays.
    """

    def __init__(self, messenger: Messenger, device: Device) -> None:
        self._mpi = MpiRoad(messenger)
        self._device = device

    def empty(self, spec: ArraySpec) -> Any:
        with self._device.activate():
            return self._device.xp.empty(spec.shape, spec.dtype)

    def broadcast(self, array: Any, root: int, max_buf_len: int | None) -> None:
        host = to_host(array)
        self._mpi.broadcast(host, root, max_buf_len)
        self._fill(array, host)

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Any]],
        incoming: Sequence[tuple[int, Any]],
        operation: str,
    ) -> None:
        into = [
            (source, array, np.empty(array.shape, array.dtype))
            for source, array in incoming
        ]
        self._mpi.exchange(
            [(dest, to_host(array)) for dest, array in outgoing],
            [(source, host) for source, _, host in into],
            operation,
        )
        for _, array, host in into:
            self._fill(array, host)

    def _fill(self, array: Any, host: Array) -> None:
        with self._device.activate():
            if array is not host:
                array[...] = self._device.xp.asarray(host)


def to_host(array: Any) -> Array:
    """Return an array in contiguous host memory. Waits for the current stream."""
    host = array if isinstance(array, np.ndarray) else array.get()
    contiguous: Array = np.ascontiguousarray(host).reshape(array.shape)
    return contiguous


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
