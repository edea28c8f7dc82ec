"""The way of buckets: packed, in flight, unpacked, several at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from communicators.buckets import Bucket
from communicators.device_reductions import start_reduction

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase

#: Buckets in flight at once. Bounds the memory beyond the arrays themselves.
MAX_IN_FLIGHT = 4


def run_buckets(
    comm: CommunicatorBase,
    device: Any,
    plan: list[Bucket],
    sources: Sequence[Any],
    results: Sequence[Any],
    op: str,
    scale: float | None,
    record: Callable[..., None] | None,
) -> None:
    """Pack, reduce and unpack buckets, several of them in flight.

    Args:
        comm: reduces them.
        device: of the arrays.
        plan: the buckets.
        sources: arrays to pack; ``None`` counts as zeros.
        results: arrays to unpack into; ``None`` is passed over.
        op: name of the reduction.
        scale: factor while packing, or ``None``.
        record: is told how long the parts took.
    """
    start = comm.start_all_reduce_flat
    in_flight: deque[tuple[int, Bucket, Any, Any, int]] = deque()

    def tell(name: str, begun_ns: int, lane: str, **details: Any) -> None:
        if record is not None:
            record(name, begun_ns, lane, **details)

    def finish_first() -> None:
        number, bucket, buffer, handle, begun_ns = in_flight.popleft()
        handle.wait()
        lane = f"bucket {number % MAX_IN_FLIGHT}"
        tell("flight", begun_ns, lane, bucket=number, nbytes=bucket.nbytes)
        begun_ns = time.perf_counter_ns()
        device.unpack(bucket, results, buffer)
        tell("unpack", begun_ns, "communication", bucket=number)
        device.give_back(buffer)

    for number, bucket in enumerate(plan):
        if len(in_flight) == MAX_IN_FLIGHT:
            finish_first()
        buffer = device.take(bucket.n_elems, bucket.dtype, comm.buffer_parts)
        begun_ns = time.perf_counter_ns()
        device.pack(bucket, sources, buffer, scale)
        tell("pack", begun_ns, "communication", bucket=number)
        begun_ns = time.perf_counter_ns()
        if device.uses_nccl:
            handle: Any = start_reduction(comm, device, buffer, op, start)
        else:
            handle = start(buffer, op)
        in_flight.append((number, bucket, buffer, handle, begun_ns))
    while in_flight:
        finish_first()
