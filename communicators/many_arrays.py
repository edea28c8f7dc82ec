"""Reducing and broadcasting many arrays at once, through buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import Agreement, digest_of
from communicators.arguments import check_root
from communicators.buckets import ArraySpec, Bucket, plan_buckets
from communicators.dtypes import (
    Array,
    check_fixed_size,
    check_op,
    result_dtype,
    wire_dtype,
)
from communicators.flat_buffer import pack, unpack

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase
    from communicators.transports.progress import Handle


#: Buckets in flight at once. Bounds the memory beyond the arrays themselves.
MAX_IN_FLIGHT = 4
_MAX_CACHED = 64


class ManyArrays:
    """``allreduce_arrays`` and ``bcast_arrays`` of one communicator.

    Digests and bucket plans are kept: a training loop passes the same specs at every
    step.
    """

    def __init__(self, comm: CommunicatorBase, agreement: Agreement) -> None:
        self._comm = comm
        self._agreement = agreement
        self._digests: dict[Any, bytes] = {}
        self._plans: dict[Any, list[Bucket]] = {}
        self._free: list[Array] = []

    def allreduce(
        self,
        arrays: Sequence[Array | ArraySpec],
        op: str,
        names: Sequence[str] | None,
        label: str,
    ) -> list[Array | None]:
        error = None
        names = _default_names(arrays, names)
        try:
            check_op(op)
            _check_names(names, arrays, label)
            for name, array in zip(names, arrays, strict=True):
                _check_reducible(name, array, op, label)
        except (TypeError, ValueError) as failure:
            error = failure
        present = [isinstance(array, np.ndarray) for array in arrays]
        key = () if error else _key(names, arrays)
        union = self._agreement.check(
            f"{label}, {op}, on the wire {self._comm.allreduce_grad_dtype}",
            () if error else _LazyDetails(key),
            digest=self._digest(key),
            error=error,
            presence=present,
        )
        assert union is not None
        sources: list[Array | None] = [
            array if isinstance(array, np.ndarray) else None for array in arrays
        ]
        results: list[Array | None] = [
            np.empty(array.shape, array.dtype) if source is None and wanted else source
            for array, source, wanted in zip(arrays, sources, union, strict=True)
        ]
        scale = 1.0 / self._comm.size if op == "mean" else None
        plan = self._plan(key, union, arrays)
        self._reduce(plan, sources, results, "sum" if op == "mean" else op, scale)
        return results

    def bcast(
        self,
        arrays: Sequence[Array],
        root: int,
        names: Sequence[str] | None,
        label: str,
    ) -> None:
        error = None
        names = _default_names(arrays, names)
        try:
            check_root(root, self._comm.size, label)
            _check_names(names, arrays, label)
            for name, array in zip(names, arrays, strict=True):
                _check_writable(name, array, label)
                check_fixed_size(array.dtype, label)
        except (TypeError, ValueError) as failure:
            error = failure
        key = () if error else _key(names, arrays)
        self._agreement.check(
            f"{label}, root={root}",
            () if error else _LazyDetails(key),
            digest=self._digest(key),
            error=error,
        )
        ring = self._comm.world_ring()
        for array in arrays:
            if array.size == 0:
                continue
            flat = np.ascontiguousarray(array).reshape(-1)
            steps = ring.broadcast(flat, self._comm.next_tag(), root)
            self._comm.start_steps(steps).wait()
            if self._comm.rank != root and not np.shares_memory(flat, array):
                np.copyto(array, flat.reshape(array.shape))

    def _reduce(
        self,
        plan: list[Bucket],
        sources: Sequence[Array | None],
        results: Sequence[Array | None],
        op: str,
        scale: float | None,
    ) -> None:
        in_flight: deque[tuple[Bucket, Array, Array, Handle]] = deque()

        def finish_first() -> None:
            bucket, storage, buffer, handle = in_flight.popleft()
            handle.wait()
            unpack(bucket, results, buffer)
            self._give_back(storage)

        for bucket in plan:
            if len(in_flight) == MAX_IN_FLIGHT:
                finish_first()
            storage = self._take(bucket.nbytes)
            buffer = storage[: bucket.nbytes].view(bucket.dtype)
            pack(bucket, sources, buffer, scale)
            handle = self._comm.start_all_reduce_flat(buffer, op)
            in_flight.append((bucket, storage, buffer, handle))
        while in_flight:
            finish_first()

    def _digest(self, key: Any) -> bytes:
        digest = self._digests.get(key)
        if digest is None:
            if len(self._digests) >= _MAX_CACHED:
                self._digests.clear()
            digest = self._digests[key] = digest_of(list(_LazyDetails(key)))
        return digest

    def _plan(
        self, key: Any, union: list[bool], arrays: Sequence[Array | ArraySpec]
    ) -> list[Bucket]:
        wire = self._comm.allreduce_grad_dtype
        cache_key = (key, tuple(union), self._comm.bucket_bytes, wire)
        plan = self._plans.get(cache_key)
        if plan is None:
            if len(self._plans) >= _MAX_CACHED:
                self._plans.clear()
            plan = self._plans[cache_key] = plan_buckets(
                [
                    (
                        index,
                        ArraySpec.of(array).n_elems,
                        wire_dtype(array.dtype, wire),
                    )
                    for index, array in enumerate(arrays)
                    if union[index]
                ],
                self._comm.bucket_bytes,
            )
        return plan

    def _take(self, nbytes: int) -> Array:
        for i, storage in enumerate(self._free):
            if storage.size >= nbytes:
                return self._free.pop(i)
        return np.empty(max(nbytes, self._comm.bucket_bytes), np.uint8)

    def _give_back(self, storage: Array) -> None:
        # A buffer for one huge array is not kept: it would double its memory.
        if storage.size <= self._comm.bucket_bytes and len(self._free) < MAX_IN_FLIGHT:
            self._free.append(storage)


class _LazyDetails(Sequence[tuple[str, str]]):
    """Names and specs as text, made only when an error needs them."""

    def __init__(self, key: Sequence[tuple[str, tuple[int, ...], Any]]) -> None:
        self._key = key

    def __len__(self) -> int:
        return len(self._key)

    def __getitem__(self, index: Any) -> Any:
        name, shape, dtype = self._key[index]
        return name, f"shape {shape} {dtype}"


def _key(names: Sequence[str], arrays: Sequence[Array | ArraySpec]) -> Any:
    return tuple(
        (name, array.shape, array.dtype)
        for name, array in zip(names, arrays, strict=True)
    )


def _default_names(arrays: Sequence[Any], names: Sequence[str] | None) -> Sequence[str]:
    if names is None:
        return [f"array {i}" for i in range(len(arrays))]
    return names


def _check_names(names: Sequence[str], arrays: Sequence[Any], label: str) -> None:
    if len(names) != len(arrays):
        raise ValueError(f"{label}: {len(names)} names for {len(arrays)} arrays")


def _check_writable(name: str, array: Any, label: str) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{label}: {name}: expected a NumPy array; got {type(array).__qualname__}"
        )
    if not array.flags.writeable:
        raise ValueError(f"{label}: {name} is read-only; it is written in place")


def _check_reducible(name: str, array: Any, op: str, label: str) -> None:
    if isinstance(array, ArraySpec):
        if op not in ("sum", "mean"):
            raise ValueError(
                f"{label}: {name} is missing here; only sum and mean take that"
            )
    else:
        _check_writable(name, array, label)
    if result_dtype(array.dtype, op, label) != array.dtype:
        raise TypeError(
            f"{label}: {name}: the {op} of {array.dtype} has another dtype, so it "
            "cannot be written in place"
        )
