"""Flat buffers inside one group of ranks, by MPI point-to-point messages.

The algorithms are ours, so that every dtype of NumPy works (MPI has no half
precision), the order of additions is fixed and the same on all ranks, and every byte
sent can be counted. Each is a generator of steps for
:class:`communicators.transports.progress.Progress`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from communicators.dtypes import Array, ufunc_of
from communicators.transports.progress import Steps
from communicators.transports.turnstile import Place, Turnstile

#: MPI counts are 32-bit in many builds; longer messages are cut.
MAX_MESSAGE_BYTES = 1 << 30

#: Bytes of a segment in the pipelined chains of reduce and broadcast.
SEGMENT_BYTES = 256 * 1024

#: Tags that every MPI has: 0 to 32767.
N_TAGS = 32768


def as_bytes(array: Array) -> Array:
    """Return a one-dimensional uint8 view of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8)


def post_send(comm: Any, data: Array, dest: int, tag: int) -> list[Any]:
    """Post sends of a contiguous uint8 array; return their requests."""
    if data.size <= MAX_MESSAGE_BYTES:
        return [comm.Isend([data, MPI.BYTE], dest, tag)] if data.size else []
    return [
        comm.Isend([data[at : at + MAX_MESSAGE_BYTES], MPI.BYTE], dest, tag)
        for at in range(0, data.size, MAX_MESSAGE_BYTES)
    ]


def post_recv(comm: Any, data: Array, source: int, tag: int) -> list[Any]:
    """Post receives into a contiguous uint8 array; return their requests."""
    if data.size <= MAX_MESSAGE_BYTES:
        return [comm.Irecv([data, MPI.BYTE], source, tag)] if data.size else []
    return [
        comm.Irecv([data[at : at + MAX_MESSAGE_BYTES], MPI.BYTE], source, tag)
        for at in range(0, data.size, MAX_MESSAGE_BYTES)
    ]


def part_bounds(n_elems: int, n_parts: int, part: int) -> tuple[int, int]:
    """Return start and stop of one of ``n_parts`` nearly equal parts."""
    return n_elems * part // n_parts, n_elems * (part + 1) // n_parts


def _combine(op: str, into: Array, received: Array) -> None:
    # Infinities, and sums of halves that become infinite, are for the caller to find.
    # A warning that is an error would end one rank and leave the others waiting.
    with np.errstate(all="ignore"):
        ufunc_of(op)(into, received, out=into)


class MpiTransport:
    """One group of ranks over an MPI communicator of its own.

    Buffers are one-dimensional and C-contiguous, of the same length and dtype on all
    ranks, and are changed in place. ``op`` is the name of a reduction; ``"mean"``
    adds, as the caller scales. Operations overlap, and each rank advances them in an
    order of its own: ``tag`` keeps their messages apart, so it differs between
    operations in flight and is the same on all ranks. It may be any number from 0.

    Args:
        mpi_comm: mpi4py communicator that nobody else uses; freed by ``finalize``.
        label: the group's name in counters.

    Attributes:
        sent_bytes (int): bytes that this rank handed to MPI for sending.
    """

    def __init__(self, mpi_comm: Any, label: str) -> None:
        self._comm = mpi_comm
        self.label = label
        self.rank: int = mpi_comm.Get_rank()
        self.size: int = mpi_comm.Get_size()
        self.sent_bytes = 0
        self._scratch: list[Array] = []
        self._turnstile = Turnstile()

    def finalize(self) -> None:
        """Free the MPI communicator. Collective; safe to call twice."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    def line_up(self) -> Place:
        """Take a place in the line before this group's link.

        Operations that have other steps before those in this group take it when they
        begin, which is in the same order on all ranks, and yield it before they go on.
        """
        return self._turnstile.line_up()

    def share_from_first(self, value: Any) -> Any:
        """Give every rank of the group the small value of rank 0. Collective."""
        return self._comm.bcast(value, root=0)

    def reduce_scatter(self, buffer: Array, op: str, tag: int) -> Steps:
        """Reduce over the group; rank ``r`` ends with part ``r`` of the result.

        The other parts of ``buffer`` hold partial results afterwards.

        Returns:
            ndarray: view of this rank's part (see :func:`part_bounds`).
        Cost: p-1 steps; the group sends (p-1) * nbytes together.
        Source: ring algorithm; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
        """
        p, rank = self.size, self.rank
        bounds = [part_bounds(buffer.size, p, i) for i in range(p)]
        longest = max(stop - start for start, stop in bounds)
        scratch = self._take_scratch(longest * buffer.itemsize)
        incoming = scratch[: longest * buffer.itemsize].view(buffer.dtype)
        for step in range(p - 1):
            # The part of rank j starts at rank j+1 and travels round to j, so its
            # terms are added in one order and on one rank at a time.
            start, stop = bounds[(rank - step - 1) % p]
            mine = slice(*bounds[(rank - step - 2) % p])
            received = incoming[: mine.stop - mine.start]
            requests = self._recv(received, (rank - 1) % p, tag)
            requests += self._send(buffer[start:stop], (rank + 1) % p, tag)
            yield requests
            _combine(op, buffer[mine], received)
        self._scratch.append(scratch)
        return buffer[slice(*bounds[rank])]

    def all_gather(self, buffer: Array, tag: int) -> Steps:
        """Give every rank all parts, rank ``r`` having put part ``r`` in its place.

        Cost: p-1 steps; the group sends (p-1) * nbytes together.
        Source: ring algorithm; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
        """
        p, rank = self.size, self.rank
        bounds = [part_bounds(buffer.size, p, i) for i in range(p)]
        for step in range(p - 1):
            out = slice(*bounds[(rank - step) % p])
            into = slice(*bounds[(rank - step - 1) % p])
            requests = self._recv(buffer[into], (rank - 1) % p, tag)
            requests += self._send(buffer[out], (rank + 1) % p, tag)
            yield requests

    def all_reduce(self, buffer: Array, op: str, tag: int) -> Steps:
        """Reduce over the group; every rank ends with the whole, bit-identical result.

        Two ranks send each other the whole buffer: the same bytes in one step.

        Cost: 2(p-1) steps, for two ranks 1; each rank sends about 2(p-1)/p * nbytes.
        """
        if self.size == 2:
            yield from self._exchange(buffer, op, tag)
            return
        yield from self.reduce_scatter(buffer, op, tag)
        yield from self.all_gather(buffer, tag)

    def _exchange(self, buffer: Array, op: str, tag: int) -> Steps:
        other = 1 - self.rank
        scratch = self._take_scratch(buffer.nbytes)
        received = scratch[: buffer.nbytes].view(buffer.dtype)
        requests = self._recv(received, other, tag)
        requests += self._send(buffer, other, tag)
        yield requests
        first, second = (buffer, received) if self.rank == 0 else (received, buffer)
        with np.errstate(all="ignore"):
            # In one order on both: which NaN comes out may depend on it.
            ufunc_of(op)(first, second, out=buffer)
        self._scratch.append(scratch)

    def reduce(self, buffer: Array, op: str, tag: int, root: int = 0) -> Steps:
        """Reduce over the group; ``root`` ends with the result.

        ``buffer`` holds partial results on the other ranks. A chain towards the root
        passes segments on as they come.

        Cost: p-1 + segments steps; every rank but the root sends nbytes.
        """
        p = self.size
        place = (self.rank - root) % p
        farther, nearer = (self.rank + 1) % p, (self.rank - 1) % p
        segments = self._segments(buffer)
        sends: list[Any] = []
        scratch = self._take_scratch(2 * SEGMENT_BYTES + 2 * buffer.itemsize)
        half = scratch.size // 2 // buffer.itemsize * buffer.itemsize
        incoming = [scratch[:half], scratch[half : 2 * half]]

        def post(i: int) -> tuple[Array, list[Any]]:
            n = segments[i].stop - segments[i].start
            into = incoming[i % 2][: n * buffer.itemsize].view(buffer.dtype)
            return into, self._recv(into, farther, tag)

        posted = post(0) if segments and place < p - 1 else None
        for i, segment in enumerate(segments):
            if posted is not None:
                received, requests = posted
                posted = post(i + 1) if i + 1 < len(segments) else None
                yield requests
                _combine(op, buffer[segment], received)
            if place > 0:
                sends += self._send(buffer[segment], nearer, tag)
        yield sends
        self._scratch.append(scratch)

    def broadcast(self, buffer: Array, tag: int, root: int = 0) -> Steps:
        """Copy the root's buffer to all ranks, in segments down a chain.

        Cost: p-1 + segments steps; every rank but the chain's last sends nbytes.
        """
        p = self.size
        place = (self.rank - root) % p
        farther, nearer = (self.rank + 1) % p, (self.rank - 1) % p
        segments = self._segments(buffer)
        sends: list[Any] = []
        coming = [
            self._recv(buffer[s], nearer, tag) if place > 0 else [] for s in segments
        ]
        for segment, requests in zip(segments, coming, strict=True):
            yield requests
            if place < p - 1:
                sends += self._send(buffer[segment], farther, tag)
        yield sends

    def _segments(self, buffer: Array) -> list[slice]:
        step = max(1, SEGMENT_BYTES // buffer.itemsize)
        return [
            slice(at, min(at + step, buffer.size)) for at in range(0, buffer.size, step)
        ]

    def _send(self, part: Array, dest: int, tag: int) -> list[Any]:
        self.sent_bytes += part.nbytes
        return post_send(self._comm, as_bytes(part), dest, tag % N_TAGS)

    def _recv(self, part: Array, source: int, tag: int) -> list[Any]:
        return post_recv(self._comm, as_bytes(part), source, tag % N_TAGS)

    def _take_scratch(self, nbytes: int) -> Array:
        for i, scratch in enumerate(self._scratch):
            if scratch.size >= nbytes:
                return self._scratch.pop(i)
        # The pool is for steady state; smaller ones would never be taken again.
        self._scratch.clear()
        return np.empty(nbytes, np.uint8)
