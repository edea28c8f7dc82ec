"""Reducing many arrays in place, each rank working in the memory of the others.

The arrays count as one long row of elements, cut into blocks. Each rank owns about as
many bytes of them as the others: it copies the block's pieces out of all other
processes, reduces them with its own, and copies the result back into all of them.
There are no flat buffers, nothing is packed, and all ranks end with the same bits, as
one rank has computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from communicators.dtypes import Array, ufunc_of
from communicators.flat_buffer import cast, multiply
from communicators.transports.cross_memory import MAX_PIECES, Process, address_of

#: Bytes of a block. It is copied, scaled, reduced and copied back while it is in the
#: second-level cache; a smaller one makes more calls. Measured, with two ranks on a
#: cache of 512 KiB: 128 KiB takes 1.4 times, 512 KiB about as long.
BLOCK_BYTES = 256 * 1024
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
    desk = _Desk(len(processes), rank, work.most_bytes, ufunc_of(op), scale)
    copied, at = 0, 0
    # Infinities, and sums of halves that become infinite, are for the caller to find.
    with np.errstate(all="ignore"):
        for block in work.blocks:
            n_pieces = len(block.indices)
            local = base + rank * row + at * item
            nbytes = block.n_elems * block.dtype.itemsize
            are_short = nbytes < n_pieces * SHORT_PIECE_BYTES
            own = None
            if not are_short:
                own = [
                    flats[i][start : start + n]
                    for i, start, n in zip(
                        block.indices, block.starts, block.lengths, strict=True
                    )
                ]
            desk.lay_out(block)
            for other, process in enumerate(processes):
                remote = base + other * row + at * item
                if other != rank or are_short:
                    process.read_pieces(
                        desk.raw_pieces[other], 1, remote, n_pieces, nbytes
                    )
                    desk.widen(other)
            if own is not None:
                desk.take_own(own)
            desk.reduce(own)
            if are_short:
                local, n_local = desk.result_piece, 1
            else:
                n_local = n_pieces
            for other, process in enumerate(processes):
                remote = base + other * row + at * item
                if other != rank or are_short:
                    process.write_pieces(local, n_local, remote, n_pieces, nbytes)
            copied += 2 * nbytes * (len(processes) - 1)
            at += n_pieces
    return copied


class _Desk:
    """Where one rank lays out a block: one row a rank, scaled, in the wire's dtype."""

    def __init__(
        self,
        n_ranks: int,
        rank: int,
        most_bytes: int,
        ufunc: np.ufunc,
        scale: float | None,
    ) -> None:
        self._rank = rank
        self._ufunc = ufunc
        self._scale = scale
        # Rows begin on cache lines. Raw bytes come into the first half where the
        # wire has another dtype.
        self._row_bytes = -(-most_bytes // 64) * 64
        self._wide = np.empty((n_ranks, self._row_bytes), np.uint8)
        self._raw = np.empty((0, 0), np.uint8)
        self._table = np.empty((n_ranks, 2), np.uint64)
        self.raw_pieces = [address_of(self._table[r]) for r in range(n_ranks)]
        self._kind: Any = None

    @property
    def result_piece(self) -> int:
        """Address of the piece that holds the result, in the arrays' dtype."""
        return self.raw_pieces[0]

    def lay_out(self, block: Block) -> None:
        """Make room for a block."""
        kind = (block.dtype, block.wire, block.n_elems)
        if kind == self._kind:
            return
        self._kind = kind
        n = block.n_elems
        self._rows = list(self._wide[:, : n * block.wire.itemsize].view(block.wire))
        raw = self._wide
        if block.dtype != block.wire:
            if not self._raw.size:
                self._raw = np.empty_like(self._wide)
            raw = self._raw
        self._raw_rows = list(raw[:, : n * block.dtype.itemsize].view(block.dtype))
        self._same = block.dtype == block.wire
        self._table[:, 0] = [address_of(row) for row in self._raw_rows]
        self._table[:, 1] = n * block.dtype.itemsize

    def widen(self, rank: int) -> None:
        """Scale what came from a rank, and cast it to the wire's dtype."""
        if self._scale is not None:
            multiply(self._rows[rank], self._raw_rows[rank], self._scale)
        elif not self._same:
            cast(self._rows[rank], self._raw_rows[rank])

    def take_own(self, pieces: Sequence[Array]) -> None:
        """Scale this rank's own pieces into its row."""
        row, at = self._rows[self._rank], 0
        for piece in pieces:
            target = row[at : at + piece.size]
            if self._scale is None:
                cast(target, piece)
            else:
                multiply(target, piece, self._scale)
            at += piece.size

    def reduce(self, own: Sequence[Array] | None) -> None:
        """Reduce the rows in the order of the ranks.

        Args:
            own: pieces to write the result into; ``None`` leaves it at
                :attr:`result_piece`.
        """
        rows, ufunc = self._rows, self._ufunc
        total = rows[0]
        for row in rows[1:-1]:
            ufunc(total, row, out=total)
        last = rows[-1] if len(rows) > 1 else None
        if own is None or not self._same:
            if last is not None:
                ufunc(total, last, out=total)
            if own is None:
                if not self._same:
                    cast(self._raw_rows[0], total)
                return
        at = 0
        for piece in own:
            part = slice(at, at + piece.size)
            if self._same and last is not None:
                ufunc(total[part], last[part], out=piece)
            else:
                cast(piece, total[part])
            at += piece.size
