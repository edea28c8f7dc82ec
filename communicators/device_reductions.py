"""Reducing device buffers of every dtype, with what NCCL has for it.

NCCL sums, multiplies and compares ten dtypes. What it does not do the way the array
collectives promise is brought into a form that it does:

* complex sums are sums of twice as many real numbers;
* the maximum and minimum of floating types, in which NaN wins, are those of integers in
  the same order (NCCL's own drop NaN, as C's ``fmax`` does);
* all others (small integers, bool, complex products) are gathered and reduced by each
  rank in rank order, which sends size/2 times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.devices.buffer import DeviceBuffer
from communicators.dtypes import ufunc_of
from communicators.nccl_bindings.interface import NCCL_TYPES

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase
    from communicators.devices.device import NcclDevice
    from communicators.transports.progress import Handle

_ORDERED_AS = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}


class Reduction:
    """One reduction of a device buffer in flight; made by :func:`start_reduction`."""

    def __init__(
        self,
        device: NcclDevice,
        buffer: DeviceBuffer,
        handle: Handle | None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        self._buffer = buffer
        self._handle = handle
        self._finish = finish

    def wait(self) -> None:
        """Let the current stream wait for the result. NCCL's part does not block."""
        if self._handle is not None:
            self._handle.wait()
        self._device.wait_for(self._buffer)
        if self._finish is not None:
            self._finish()


def start_reduction(
    comm: CommunicatorBase,
    device: NcclDevice,
    buffer: DeviceBuffer,
    op: str,
    start: Callable[[DeviceBuffer, str], Handle],
) -> Reduction:
    """Begin to reduce a buffer in place over all ranks. Collective.

    Args:
        comm: the communicator.
        start: its algorithm, for what NCCL can reduce.
        device: of the buffer.
        buffer: same length and dtype on all ranks; at least one element.
        op: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``.
    """
    dtype = buffer.dtype
    if dtype.kind == "c" and op == "sum" and dtype.itemsize in (8, 16):
        real = buffer.view(f"f{dtype.itemsize // 2}")
        return Reduction(device, real, start(real, op))
    if op in ("max", "min") and dtype.kind == "f" and dtype.itemsize in _ORDERED_AS:
        ordered = _to_ordered_integers(device, buffer, op)
        handle = start(ordered, op)

        def back() -> None:
            # The winning integers become NaN: their bits have a full exponent.
            _reverse_negatives(device, device.view(ordered))

        return Reduction(device, ordered, handle, back)
    if is_native(dtype, op):
        return Reduction(device, buffer, start(buffer, op))
    return _gather_and_reduce(comm, device, buffer, op)


def is_native(dtype: np.dtype[Any], op: str) -> bool:
    """Tell whether NCCL itself has the reduction, with NumPy's result."""
    if dtype.name not in NCCL_TYPES:
        return False
    return op in ("sum", "prod") or dtype.kind in "iu"


def _to_ordered_integers(
    device: NcclDevice, buffer: DeviceBuffer, op: str
) -> DeviceBuffer:
    """Turn floating numbers, in place, into integers of the same order.

    Non-negative ones are ordered by their bits already; negative ones the other way
    round. NaN becomes the integer that wins.
    """
    ordered = buffer.view(_ORDERED_AS[buffer.itemsize])
    device.wait_for(buffer)
    numbers, integers = device.view(buffer), device.view(ordered)
    limits = np.iinfo(ordered.dtype)
    winner = limits.max if op == "max" else limits.min
    is_nan = device.xp.isnan(numbers)
    _reverse_negatives(device, integers)
    integers[is_nan] = winner
    return ordered


def _reverse_negatives(device: NcclDevice, integers: Any) -> None:
    limits = np.iinfo(integers.dtype)
    mask = device.xp.where(integers < 0, limits.max, 0).astype(integers.dtype)
    integers ^= mask


def _gather_and_reduce(
    comm: CommunicatorBase, device: NcclDevice, buffer: DeviceBuffer, op: str
) -> Reduction:
    nccl = comm.nccl.world
    if nccl is None:
        return _reduce_through_host(comm, device, buffer, op)
    own = device.view(buffer)
    rows = device.xp.empty((comm.size, buffer.size), buffer.dtype)
    everything = device.wrap(rows)
    nccl.gather_all(buffer, everything)

    def finish() -> None:
        combine = getattr(device.xp, ufunc_of(op).__name__)
        own[...] = rows[0]
        for row in rows[1:]:
            combine(own, row, out=own)

    return Reduction(device, everything, None, finish)


def _reduce_through_host(
    comm: CommunicatorBase, device: NcclDevice, buffer: DeviceBuffer, op: str
) -> Reduction:
    host = comm.nccl.to_host(buffer)
    steps = comm.world_ring().mpi.all_reduce(host, op, comm.next_tag())
    comm.start_steps(steps).wait()
    device.copy_from_host(host, buffer)
    return Reduction(device, buffer, None)
