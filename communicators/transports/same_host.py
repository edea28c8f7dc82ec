"""Flat buffers inside a group of ranks of one host, each rank reading the others'.

A rank publishes the address of its buffer, waits until all have, and copies what it
needs out of the other processes' memory. Nothing is copied into a buffer in between,
and the ranks meet two to four times an operation, however large it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from communicators.dtypes import Array, ufunc_of
from communicators.errors import (
    CommunicatorError,
    RankFailedError,
    UnavailableError,
)
from communicators.transports import cross_memory
from communicators.transports.flags import N_SLOTS, Flags
from communicators.transports.host_arrays import ArraysPlan, reduce_blocks
from communicators.transports.mpi import part_bounds
from communicators.transports.progress import Steps

#: Bytes that are combined at a time: they stay in the second-level cache, and a call of
#: the kernel is short beside what it copies.
BLOCK_BYTES = 256 * 1024


#: What other ranks may still write to after an operation has ended in an error.
_in_use: list[Any] = []


class SameHostTransport:
    """One group of ranks that reach each other's memory.

    The operations are those of :class:`communicators.transports.mpi.MpiTransport`, and
    what is added up is added in the order of the ranks, wherever it lies in a buffer.

    Args:
        label: the group's name in counters.
        flags: of the group.
        processes: of the group's ranks.
        rank: this process's number in the group.

    Attributes:
        sent_bytes (int): bytes that this rank has copied from or to the other ranks.
    """

    def __init__(
        self,
        label: str,
        flags: Flags,
        processes: Sequence[cross_memory.Process],
        rank: int,
    ) -> None:
        self.label = label
        self.rank = rank
        self.size = len(processes)
        self.sent_bytes = 0
        self._flags = flags
        self._processes = processes
        self._scratch = np.empty(0, np.uint8)
        # Numbers of operations are those of the caller's tags; a rank that gives the
        # same tag to two phases goes on counting the stages.
        self._stages: dict[int, int] = {}

    # -- operations ------------------------------------------------------------------

    def reduce_scatter(self, buffer: Array, op: str, tag: int) -> Steps:
        """Reduce over the group; rank ``r`` ends with part ``r`` of the result.

        The other parts of ``buffer`` are left as they are.

        Returns:
            ndarray: view of this rank's part.
        Cost: 2 meetings; each rank copies (p-1)/p * nbytes.
        """
        return self._telling(tag, buffer, self._reduce_scatter(buffer, op, tag))

    def _reduce_scatter(self, buffer: Array, op: str, tag: int) -> Steps:
        start, stop = part_bounds(buffer.size, self.size, self.rank)
        yield [self._meet(tag, buffer)]
        addresses = self._flags.values(tag)
        self._combine(buffer, start, stop, op, addresses)
        yield [self._meet(tag)]
        return buffer[start:stop]

    def all_gather(self, buffer: Array, tag: int) -> Steps:
        """Give every rank all parts, rank ``r`` having put part ``r`` in its place.

        Cost: 2 meetings; each rank copies (p-1)/p * nbytes.
        """
        return self._telling(tag, buffer, self._all_gather(buffer, tag))

    def _all_gather(self, buffer: Array, tag: int) -> Steps:
        yield [self._meet(tag, buffer)]
        self._collect(buffer, tag)
        yield [self._meet(tag)]

    def all_reduce(self, buffer: Array, op: str, tag: int) -> Steps:
        """Reduce over the group; every rank ends with the whole, bit-identical result.

        Cost: 4 meetings; each rank copies 2(p-1)/p * nbytes.
        """
        yield from self.reduce_scatter(buffer, op, tag)
        yield from self.all_gather(buffer, tag)

    def reduce(self, buffer: Array, op: str, tag: int, root: int = 0) -> Steps:
        """Reduce over the group; ``root`` ends with the result.

        ``buffer`` holds partial results on the other ranks. All ranks reduce a part,
        and the root collects them.

        Cost: 4 meetings; each rank copies (p-1)/p * nbytes, the root twice that.
        """
        return self._telling(tag, buffer, self._reduce(buffer, op, tag, root))

    def _reduce(self, buffer: Array, op: str, tag: int, root: int) -> Steps:
        yield from self.reduce_scatter(buffer, op, tag)
        yield [self._meet(tag, buffer)]
        if self.rank == root:
            self._collect(buffer, tag)
        yield [self._meet(tag)]

    def broadcast(self, buffer: Array, tag: int, root: int = 0) -> Steps:
        """Copy the root's buffer to all ranks.

        Cost: 2 meetings; every rank but the root copies nbytes.
        """
        return self._telling(tag, buffer, self._broadcast(buffer, tag, root))

    def _broadcast(self, buffer: Array, tag: int, root: int) -> Steps:
        yield [self._meet(tag, buffer)]
        if self.rank != root:
            self._copy(buffer, 0, buffer.size, root, self._flags.values(tag)[root])
        yield [self._meet(tag)]

    def reduce_arrays(
        self,
        plan: ArraysPlan,
        arrays: Sequence[Array],
        op: str,
        scale: float | None,
        tag: int,
    ) -> Steps:
        """Reduce many arrays over the group, in place, as if they were one buffer.

        Args:
            plan: of the arrays, the same on all ranks.
            arrays: C-contiguous ones.
            op: name of the reduction.
            scale: factor before the reduction, or ``None``.
            tag: of the operation.
        Cost: 2 meetings; each rank copies 2(p-1)/p * nbytes.
        """
        steps = self._reduce_arrays(plan, arrays, op, scale, tag)
        return self._telling(tag, arrays, steps)

    def _reduce_arrays(
        self,
        plan: ArraysPlan,
        arrays: Sequence[Array],
        op: str,
        scale: float | None,
        tag: int,
    ) -> Steps:
        table = np.array([cross_memory.address_of(a) for a in arrays], np.uint64)
        yield [self._meet(tag, table)]
        tables = np.empty((self.size, table.size), np.uint64)
        for rank, address in enumerate(self._flags.values(tag)):
            self._processes[rank].read_into(tables[rank], address)
        self.sent_bytes += reduce_blocks(
            plan,
            arrays,
            tables,
            self._processes,
            self.rank,
            op,
            scale,
            lambda: self._flags.raise_if_failed(tag),
        )
        yield [self._meet(tag)]

    # -- parts -----------------------------------------------------------------------

    def _meet(self, tag: int, array: Array | None = None) -> Any:
        """Reach the operation's next stage; return what says whether all have."""
        stage = self._stages.get(tag, 0) + 1
        if stage == 1 and len(self._stages) > 2 * N_SLOTS:
            # Of operations whose flags serve others by now.
            oldest = tag - N_SLOTS
            self._stages = {t: n for t, n in self._stages.items() if t > oldest}
        self._stages[tag] = stage
        address = None if array is None else cross_memory.address_of(array)
        self._flags.raise_own(tag, stage, address)
        return self._flags.all_at(tag, stage)

    def _telling(self, tag: int, arrays: Any, steps: Steps) -> Steps:
        """Tell the other ranks if the steps end in an error, or are given up.

        The arrays are kept for good then: others may be at work in them.
        """
        try:
            return (yield from steps)
        except BaseException as error:
            _in_use.append(arrays)
            # Given up for another operation's sake, or for another rank's.
            has_heard = isinstance(error, GeneratorExit | RankFailedError)
            self._flags.fail(tag, has_heard=has_heard)
            raise

    def _collect(self, buffer: Array, tag: int) -> None:
        """Copy the other ranks' parts into ``buffer``."""
        addresses = self._flags.values(tag)
        # Beginning behind this rank: not all at one.
        for rank in [(self.rank + i) % self.size for i in range(1, self.size)]:
            start, stop = part_bounds(buffer.size, self.size, rank)
            self._copy(buffer, start, stop, rank, addresses[rank])

    def _combine(
        self,
        buffer: Array,
        start: int,
        stop: int,
        op: str,
        addresses: Sequence[int],
    ) -> None:
        """Reduce ``buffer[start:stop]`` over all ranks, into this rank's buffer."""
        ufunc, itemsize = ufunc_of(op), buffer.itemsize
        step = max(1, min(BLOCK_BYTES // itemsize, stop - start))
        scratch = self._take_scratch(2 * step, buffer.dtype)
        # Infinities, and sums that become infinite, are for the caller to find.
        with np.errstate(all="ignore"):
            for at in range(start, stop, step):
                own = buffer[at : min(at + step, stop)]
                total, other = scratch[: own.size], scratch[step : step + own.size]
                left: Array | None = None
                for rank in range(self.size):
                    right = own
                    if rank != self.rank:
                        right = total if left is None else other
                        source = addresses[rank] + at * itemsize
                        self._processes[rank].read_into(right, source)
                        self.sent_bytes += right.nbytes
                    if left is None:
                        left = right
                        continue
                    is_last = rank == self.size - 1
                    out = own if is_last else total
                    ufunc(left, right, out=out)
                    left = out

    def _copy(self, buffer: Array, start: int, stop: int, rank: int, at: int) -> None:
        if stop > start:
            part = buffer[start:stop]
            self._processes[rank].read_into(part, at + start * buffer.itemsize)
            self.sent_bytes += part.nbytes

    def _take_scratch(self, n_elems: int, dtype: np.dtype[Any]) -> Array:
        nbytes = n_elems * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)


def connect(mpi_comm: Any, label: str) -> SameHostTransport:
    """Make the transport of ranks that run on one host. Collective.

    Args:
        mpi_comm: mpi4py communicator of the group.
        label: the group's name in counters.

    Raises:
        UnavailableError: they do not reach each other's memory; on all ranks, and the
            text says why.
    """
    rank = mpi_comm.Get_rank()
    reason = cross_memory.why_not()
    if reason is None:
        cross_memory.let_others_in()
    flags = None
    reasons = [text for text in mpi_comm.allgather(reason) if text]
    if not reasons:
        try:
            flags = Flags.share(mpi_comm)
        except Exception as error:  # whatever it is, the other ranks are waiting
            reason = f"no shared memory ({type(error).__name__}: {error})"
        reasons = [text for text in mpi_comm.allgather(reason) if text]
    if reasons:
        raise UnavailableError(reasons[0])
    assert flags is not None
    token = np.random.default_rng(os.getpid()).integers(0, 1 << 62, 4)
    told = mpi_comm.allgather((os.getpid(), cross_memory.address_of(token), token))
    processes = [
        cross_memory.Process(pid, f"rank {r} of the group {label}")
        for r, (pid, _, _) in enumerate(told)
    ]
    # Those that cannot be reached may be in another container.
    for process, (_, address, expected) in zip(processes, told, strict=True):
        seen = np.empty_like(token)
        try:
            process.read_into(seen, address)
            if not np.array_equal(seen, expected):
                reason = "the ranks do not see each other's processes"
        except CommunicatorError as error:
            reason = str(error)
    reasons = [text for text in mpi_comm.allgather(reason) if text]
    if reasons:
        raise UnavailableError(reasons[0])
    return SameHostTransport(label, flags, processes, rank)
