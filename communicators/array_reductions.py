"""Reducing single arrays, or tuples of them, into new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import Agreement
from communicators.array_collectives import as_array_list
from communicators.buckets import ArraySpec
from communicators.dtypes import Array, accumulation_dtype, check_op, result_dtype

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase

# An input array and the dtype of its result.
_Prepared = tuple[Array, np.dtype[Any]]


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
        is_tuple, prepared = self._enter("allreduce", data, op)
        results = []
        for array, dtype in prepared:
            flat = _accumulator(array, dtype)
            if flat.size:
                self._comm.all_reduce_flat(flat, _kind(op))
            results.append(self._finish(flat, array.shape, dtype, op))
        return tuple(results) if is_tuple else results[0]

    def reduce_scatter(self, data: Any, op: str) -> Any:
        n_rows = self._comm.size
        is_tuple, prepared = self._enter("reduce_scatter", data, op, n_rows)
        ring = self._comm.world_ring()
        results = []
        for array, dtype in prepared:
            flat = _accumulator(array, dtype)
            steps = ring.reduce_scatter(flat, _kind(op), self._comm.next_tag())
            own = self._comm.start_steps(steps).wait()
            results.append(self._finish(own, array.shape[1:], dtype, op))
        return tuple(results) if is_tuple else results[0]

    def _enter(
        self, operation: str, data: Any, op: str, n_rows: int | None = None
    ) -> tuple[bool, list[_Prepared]]:
        error = None
        is_tuple, prepared = False, []
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
        except (TypeError, ValueError) as failure:
            error = failure
        specs = [str(ArraySpec.of(array)) for array, _ in prepared]
        self._agreement.check(operation, f"op={op}, {', '.join(specs)}", error=error)
        return is_tuple, prepared

    def _finish(
        self, flat: Array, shape: tuple[int, ...], dtype: np.dtype[Any], op: str
    ) -> Array:
        if op == "mean":
            flat = flat / self._comm.size
        # A copy where ``flat`` is a part of a larger buffer, which it would keep.
        is_part = flat.base is not None
        return flat.astype(dtype, copy=is_part).reshape(shape)


def _kind(op: str) -> str:
    return "sum" if op == "mean" else op


def _accumulator(array: Array, dtype: np.dtype[Any]) -> Array:
    flat = np.empty(array.size, accumulation_dtype(dtype))
    np.copyto(flat.reshape(array.shape), array, casting="unsafe")
    return flat
