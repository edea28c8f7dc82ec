"""Reducing many arrays in place, each rank working in the memory of the others.

The arrays count as one long row of elements, cut into blocks. Each rank owns about as
many bytes of them as the others: it copies the block's pieces out of all other
processes, reduces them with its own, and copies the result back into all of them.
There are no flat buffers, nothing is packed, and all ranks end with the same bits, as
one rank has computed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from communicators.dtypes import Array, ufunc_of
from communicators.flat_buffer import cast, multiply
from communicators.transports.cross_memory import MAX_PIECES, Process, address_of

#: Bytes of a block. It is copied, scaled, reduced and copied back while it is in the
#: second-level cache; a smaller one makes more calls. Measured, with two ranks on a
#: cache of 512 KiB: 256 KiB takes 1.15 times as long, 512 KiB as long.
BLOCK_BYTES = 384 * 1024
#: Blocks are smaller where there are not enough of them for all ranks, down to this.
MIN_BLOCK_BYTES = 4 * 1024
#: Pieces shorter than this are copied together by the kernel, own ones as well: a call
#: of NumPy for each would take longer.
SHORT_PIECE_BYTES = 4 * 1024


@dataclass
class Block:
    """Consecutive elements of arrays of one dtype.

    Attributes:
        dtype: of the arrays.
        wire: dtype in which they are reduced.
        indices: which arrays.
        starts: first element of each one's piece.
        lengths: elements of each piece.
    """

    dtype: np.dtype[Any]
    wire: np.dtype[Any]
    indices: list[int]
    starts: list[int]
    lengths: list[int]

    @property
    def n_elems(self) -> int:
        """Elements of all pieces."""
        return sum(self.lengths)


class ArraysPlan:
    """Which rank reduces which pieces of the arrays.

    Args:
        sizes: ``(n_elems, dtype, wire dtype)`` of each array, in an order equal on all
            ranks.
        n_ranks: how many ranks share the work.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, np.dtype[Any], np.dtype[Any]]],
        n_ranks: int,
    ) -> None:
        self.n_arrays = len(sizes)
        total = sum(n * dtype.itemsize for n, dtype, _ in sizes)
        share = -(-total // n_ranks)
        block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, share))
        self._blocks_of: list[list[Block]] = [[] for _ in range(n_ranks)]
        self._work_of: dict[int, Work] = {}
        done = 0
        for block in _cut(sizes, block_bytes):
            owner = min(done // share, n_ranks - 1) if share else 0
            self._blocks_of[owner].append(block)
            done += block.n_elems * block.dtype.itemsize

    def blocks_of(self, rank: int) -> Sequence[Block]:
        """Return what one rank has to do."""
        return self._blocks_of[rank]

    def work_of(self, rank: int) -> Work:
        """Return what one rank has to do, as tables, which are kept."""
        if rank not in self._work_of:
            self._work_of[rank] = Work(self._blocks_of[rank])
        return self._work_of[rank]


def _cut(
    sizes: Sequence[tuple[int, np.dtype[Any], np.dtype[Any]]], block_bytes: int
) -> list[Block]:
    blocks: list[Block] = []
    by_kind: dict[tuple[Any, Any], list[int]] = {}
    for index, (n, dtype, wire) in enumerate(sizes):
        if n and dtype.itemsize:
            by_kind.setdefault((dtype, wire), []).append(index)
    for (dtype, wire), indices in by_kind.items():
        longest = max(1, block_bytes // max(dtype.itemsize, wire.itemsize))
        block, room = None, 0
        for index in indices:
            start, n = 0, sizes[index][0]
            while start < n:
                if block is None or not room or len(block.indices) == MAX_PIECES:
                    block, room = Block(dtype, wire, [], [], []), longest
                    blocks.append(block)
                length = min(n - start, room)
                block.indices.append(index)
                block.starts.append(start)
                block.lengths.append(length)
                start, room = start + length, room - length
    return blocks


class Work:
    """One rank's blocks, as tables."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        indices = [i for block in blocks for i in block.indices]
        self.indices = np.array(indices, np.intp)
        self.offsets = np.array(
            [s * b.dtype.itemsize for b in blocks for s in b.starts], np.uint64
        )
        self.nbytes = np.array(
            [n * b.dtype.itemsize for b in blocks for n in b.lengths], np.uint64
        )
        self.most_bytes = max(
            (b.n_elems * max(b.dtype.itemsize, b.wire.itemsize) for b in blocks),
            default=0,
        )

    def pieces(self, tables: Array) -> Array:
        """Return ``(address, nbytes)`` of each piece on each rank.

        Args:
            tables: addresses of the arrays on each rank, shape (ranks, arrays).
        """
        pieces = np.empty((len(tables), self.indices.size, 2), np.uint64)
        pieces[:, :, 0] = tables[:, self.indices] + self.offsets
        pieces[:, :, 1] = self.nbytes
        return pieces


def reduce_blocks(
    plan: ArraysPlan,
    arrays: Sequence[Array],
    tables: Array,
    processes: Sequence[Process],
    rank: int,
    op: str,
    scale: float | None,
) -> int:
    """Reduce this rank's blocks on all ranks, while the others do nothing but theirs.

    Args:
        plan: of the arrays.
        arrays: this rank's; C-contiguous.
        tables: addresses of the arrays on each rank, shape (ranks, arrays), uint64.
        processes: of the ranks.
        rank: this one.
        op: name of the reduction.
        scale: factor before the reduction, or ``None``.

    Returns:
        The number of bytes copied from and to other ranks.

    Raises:
        CommunicatorError: another process cannot be reached.
    """
    work = plan.work_of(rank)
    if not work.blocks:
        return 0
    flats = [array.reshape(-1) for array in arrays]
    pieces = work.pieces(tables)
    row, item = pieces.strides[0], pieces.strides[1]
    base = address_of(pieces)
    desk = _Desk(work, ufunc_of(op), scale)
    copied, at = 0, 0
    # Infinities, and sums of halves that become infinite, are for the caller to find.
    with np.errstate(all="ignore"):
        for block in work.blocks:
            n_pieces = len(block.indices)
            nbytes = block.n_elems * block.dtype.itemsize
            remote = [base + r * row + at * item for r in range(len(processes))]
            are_short = nbytes < n_pieces * SHORT_PIECE_BYTES
            desk.lay_out(block)
            if are_short:
                processes[rank].read_pieces(
                    desk.raw_piece, 1, remote[rank], n_pieces, nbytes
                )
                desk.take_own_raw()
            else:
                own = [
                    flats[i][start : start + n]
                    for i, start, n in zip(
                        block.indices, block.starts, block.lengths, strict=True
                    )
                ]
                desk.take_own(own)
            for other, process in enumerate(processes):
                is_last = other == len(processes) - 1
                if other == rank:
                    desk.add_own(is_last)
                else:
                    process.read_pieces(
                        desk.raw_piece, 1, remote[other], n_pieces, nbytes
                    )
                    desk.add_raw(is_last)
            if are_short:
                desk.put_own_raw()
                local, n_local = desk.raw_piece, 1
            else:
                desk.put_own(own)
                local, n_local = remote[rank], n_pieces
            for other, process in enumerate(processes):
                if other != rank or are_short:
                    process.write_pieces(
                        local, n_local, remote[other], n_pieces, nbytes
                    )
            copied += 2 * nbytes * (len(processes) - 1)
            at += n_pieces
    return copied


class _Desk:
    """Where one rank reduces a block, in the order of the ranks.

    Its own pieces are reduced where they are, unless the wire has another dtype or they
    are short: what is worked on should fit into the cache.

    Args:
        work: all that is going to be laid out.
        ufunc: combines two partial results.
        scale: factor before the reduction, or ``None``.
    """

    def __init__(self, work: Work, ufunc: np.ufunc, scale: float | None) -> None:
        self._ufunc = ufunc
        self._scale = scale
        # Rows begin on cache lines: the sum so far, what comes next, own elements in
        # the wire's dtype, and raw bytes where the wire has another one.
        row_bytes = -(-work.most_bytes // 64) * 64
        self._memory = np.empty((4, row_bytes), np.uint8)
        self._table = np.empty((3, 2), np.uint64)
        self._pieces = [address_of(entry) for entry in self._table]
        self._kind: Any = None

    def lay_out(self, block: Block) -> None:
        """Begin with a block."""
        kind = (block.dtype, block.wire, block.n_elems)
        if kind != self._kind:
            self._kind = kind
            wide = self._memory[:3, : block.n_elems * block.wire.itemsize]
            self._total, self._next, self._own_row = wide.view(block.wire)
            raw_bytes = block.n_elems * block.dtype.itemsize
            self._same = block.dtype == block.wire
            if self._same:
                self._raws = [self._total, self._next, self._own_row]
            else:
                raw = self._memory[3, :raw_bytes].view(block.dtype)
                self._raws = [raw, raw, raw]
            for entry, array in zip(self._table, self._raws, strict=True):
                entry[:] = address_of(array), raw_bytes
        # 0: the sum so far, 1: what comes next, 2: own elements.
        self._place = 2
        self._has_sum = False
        self._sum_is_own = False

    @property
    def raw_piece(self) -> int:
        """Address of the piece for the bytes that are copied next, in or out."""
        return self._pieces[self._place]

    def take_own_raw(self) -> None:
        """Take over this rank's elements, whose bytes are at :attr:`raw_piece`."""
        self._widen(self._own_row, self._raws[2])
        self._own = [self._own_row]
        self._place = 0

    def take_own(self, pieces: Sequence[Array]) -> None:
        """Take over this rank's elements."""
        self._place = 0
        if self._same:
            self._own = list(pieces)
            if self._scale is not None:
                for piece in pieces:
                    multiply(piece, piece, self._scale)
            return
        self._own, at = [self._own_row], 0
        for piece in pieces:
            self._widen(self._own_row[at : at + piece.size], piece)
            at += piece.size

    def add_raw(self, is_last: bool) -> None:
        """Reduce with the elements of the next rank, whose bytes have been copied.

        Args:
            is_last: no rank comes behind it.
        """
        row = (self._total, self._next)[self._place]
        self._widen(row, self._raws[self._place])
        if not self._has_sum:
            self._has_sum, self._place = True, 1
        elif self._sum_is_own:
            for piece, part in self._own_parts():
                self._ufunc(piece, row[part], out=piece)
        elif is_last:
            for piece, part in self._own_parts():
                self._ufunc(self._total[part], row[part], out=piece)
        else:
            self._ufunc(self._total, row, out=self._total)

    def add_own(self, is_last: bool) -> None:
        """Reduce with this rank's elements, as its turn has come."""
        if not self._has_sum:
            self._has_sum = self._sum_is_own = True
            self._place = 1
            return
        for piece, part in self._own_parts():
            total = self._total[part]
            self._ufunc(total, piece, out=piece if is_last else total)

    def _own_parts(self) -> Iterator[tuple[Array, slice]]:
        at = 0
        for piece in self._own:
            yield piece, slice(at, at + piece.size)
            at += piece.size

    def _widen(self, target: Array, source: Array) -> None:
        """Scale, and cast to the wire's dtype."""
        if self._scale is not None:
            multiply(target, source, self._scale)
        elif not self._same:
            cast(target, source)

    def put_own_raw(self) -> None:
        """Put the result where :attr:`raw_piece` is."""
        self._place = 2
        if not self._same:
            cast(self._raws[2], self._own_row)

    def put_own(self, pieces: Sequence[Array]) -> None:
        """Put the result into this rank's arrays."""
        if not self._same:
            at = 0
            for piece in pieces:
                cast(piece, self._own_row[at : at + piece.size])
                at += piece.size
