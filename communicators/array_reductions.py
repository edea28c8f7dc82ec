"""Reducing single arrays, or tuples of them, into new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import Agreement
from communicators.array_collectives import as_array_list
from communicators.buckets import ArraySpec
from communicators.device_reductions import is_native, start_reduction
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import Device
from communicators.devices.host import padded
from communicators.devices.kinds import GPU
from communicators.dtypes import accumulation_dtype, check_op, result_dtype
from communicators.errors import CommunicatorError
from communicators.transports.progress import Finished

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase

# An input array and the dtype of its result.
_Prepared = tuple[Any, np.dtype[Any]]


class ArrayReductions:
    """``allreduce`` and ``reduce_scatter`` of one communicator.

    Contracts are in :class:`communicators.base.CommunicatorBase`. A mean is divided
    after the sum, which is exact for integers and cannot overflow, as half precision
    is summed in float32.
    """

    def __init__(self, comm: CommunicatorBase, agreement: Agreement) -> None:
        self._comm = comm
        self._agreement = agreement

    def allreduce(self, data: Any, op: str) -> Any:
        is_tuple, prepared, device = self._enter("allreduce", data, op)
        results = []
        for array, dtype in prepared:
            with self._comm.nccl.working_on(device):
                if device.uses_nccl:
                    flat = self._reduced_by_nccl(device, array, dtype, op)
                else:
                    flat = _accumulator(array, dtype)
                    if flat.size:
                        self._comm.all_reduce_flat(flat, _kind(op))
                results.append(self._finish(flat, array.shape, dtype, op))
        return tuple(results) if is_tuple else results[0]

    def reduce_scatter(self, data: Any, op: str) -> Any:
        n_rows = self._comm.size
        is_tuple, prepared, device = self._enter(
            "reduce_scatter", data, op, n_rows, by_ring=True
        )
        results = []
        for array, dtype in prepared:
            with self._comm.nccl.working_on(device):
                if device.uses_nccl:
                    own = self._scattered_by_nccl(device, array, dtype, op)
                else:
                    flat = _accumulator(array, dtype)
                    tag = self._comm.next_tag()
                    ring = self._comm.world_ring()
                    steps = ring.reduce_scatter(flat, _kind(op), tag)
                    own = self._comm.start_steps(steps).wait()
                results.append(self._finish(own, array.shape[1:], dtype, op))
        return tuple(results) if is_tuple else results[0]

    def _reduced_by_nccl(
        self, device: Any, array: Any, dtype: np.dtype[Any], op: str
    ) -> Any:
        """Return the flat result, in the dtype of accumulation."""
        wide = accumulation_dtype(dtype)
        n_padded = padded(array.size, wide.itemsize, self._comm.buffer_parts)
        flat = device.xp.zeros(n_padded, wide)
        flat[: array.size] = array.reshape(-1)
        if array.size:
            buffer = device.wrap(flat)
            start_reduction(self._comm, device, buffer, _kind(op), self._reduce).wait()
        return flat[: array.size]

    def _reduce(self, buffer: DeviceBuffer, op: str) -> Finished:
        self._comm.all_reduce_flat(buffer, op)
        return Finished()

    def _scattered_by_nccl(
        self, device: Any, array: Any, dtype: np.dtype[Any], op: str
    ) -> Any:
        wide = accumulation_dtype(dtype)
        nccl = self._comm.nccl.world
        if nccl is None or not is_native(wide, _kind(op)):
            # Rare dtypes, or no NCCL over all ranks: of the whole result one block.
            whole = self._reduced_by_nccl(device, array, dtype, op)
            return whole.reshape(self._comm.size, -1)[self._comm.rank]
        flat = device.xp.empty(array.size, wide)
        flat[...] = array.reshape(-1)
        if not array.size:
            return flat
        steps = nccl.reduce_scatter(device.wrap(flat), _kind(op), 0)
        own = self._comm.start_steps(steps).wait()
        device.wait_for(own)
        return device.view(own).copy()

    def _enter(
        self,
        operation: str,
        data: Any,
        op: str,
        n_rows: int | None = None,
        *,
        by_ring: bool = False,
    ) -> tuple[bool, list[_Prepared], Device]:
        error: Exception | None = None
        is_tuple, prepared = False, []
        device = self._comm.devices.host
        try:
            check_op(op)
            is_tuple, arrays = as_array_list(data, operation)
            for array in arrays:
                if n_rows is not None and array.shape[:1] != (n_rows,):
                    raise ValueError(
                        f"{operation}: shape {array.shape}; expected {n_rows} rows, "
                        "one block per rank"
                    )
                prepared.append((array, result_dtype(array.dtype, op, operation)))
            device = self._comm.devices.for_arrays(arrays, operation)
            check_device(self._comm, device, operation)
        except (TypeError, ValueError, CommunicatorError) as failure:
            error = failure
        specs = [str(ArraySpec.of(array)) for array, _ in prepared]
        self._agreement.check(
            operation,
            f"op={op}, {', '.join(specs)}",
            error=error,
            shown=lambda: ", ".join(specs),
        )
        return is_tuple, prepared, self._comm.prepare(device, by_ring=by_ring)

    def _finish(
        self, flat: Any, shape: tuple[int, ...], dtype: np.dtype[Any], op: str
    ) -> Any:
        if op == "mean":
            flat = flat / self._comm.size
        # A copy where ``flat`` is a part of a larger buffer, which it would keep.
        is_part = flat.base is not None
        return flat.astype(dtype, copy=is_part).reshape(shape)


def check_device(comm: CommunicatorBase, device: Device, operation: str) -> None:
    """Refuse GPU arrays where a communicator's algorithm takes NumPy arrays only.

    Raises:
        TypeError: it does; the text says so.
    """
    if device.kind == GPU and GPU not in comm.device_types:
        raise TypeError(
            f"{operation}: the communicator {comm.name!r} reduces NumPy arrays only; "
            f"got arrays on {device}"
        )


def _kind(op: str) -> str:
    return "sum" if op == "mean" else op


def _accumulator(array: Any, dtype: np.dtype[Any]) -> Any:
    flat = np.empty(array.size, accumulation_dtype(dtype))
    np.copyto(flat.reshape(array.shape), array, casting="unsafe")
    return flat
