"""Reducing many arrays in place, each rank working in the memory of the others.

The arrays count as one long row of elements, cut into blocks. Each rank owns about as
many bytes of them as the others: it copies the block's pieces out of all other
processes, reduces them with its own, and copies the result back into all of them.
There are no flat buffers, nothing is packed, and all ranks end with the same bits, as
one rank has computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from communicators.dtypes import Array, ufunc_of
from communicators.flat_buffer import cast, multiply
from communicators.transports.cross_memory import MAX_PIECES, Process, address_of

#: Bytes of a block. It is copied, scaled, reduced and copied back while it is in the
#: second-level cache; a smaller one makes more calls. Measured, with two ranks on a
#: cache of 512 KiB and all at work: 256 KiB takes 1.2 times as long, 128 KiB 1.7 times.
BLOCK_BYTES = 512 * 1024
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
    check: Callable[[], None],
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
        check: raises if the other ranks do not want anything written any more.

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
    desk = _Desk(work, len(processes), rank, ufunc_of(op), scale)
    copied, at = 0, 0
    # Infinities, and sums of halves that become infinite, are for the caller to find.
    with np.errstate(all="ignore"):
        for block in work.blocks:
            n_pieces = len(block.indices)
            nbytes = block.n_elems * block.dtype.itemsize
            remote = [base + r * row + at * item for r in range(len(processes))]

            def fetch(
                other: int,
                into: int,
                remote: Sequence[int] = remote,
                n_pieces: int = n_pieces,
                nbytes: int = nbytes,
            ) -> None:
                processes[other].read_pieces(into, 1, remote[other], n_pieces, nbytes)

            desk.lay_out(block)
            own = None
            if nbytes >= n_pieces * SHORT_PIECE_BYTES:
                own = [
                    flats[i][start : start + n]
                    for i, start, n in zip(
                        block.indices, block.starts, block.lengths, strict=True
                    )
                ]
            desk.reduce(own, fetch)
            check()
            # Short pieces are all in one row now, for this rank as for the others.
            local = desk.result_piece if own is None else remote[rank]
            n_local = 1 if own is None else n_pieces
            for other, process in enumerate(processes):
                if other != rank or own is None:
                    there = remote[other]
                    process.write_pieces(local, n_local, there, n_pieces, nbytes)
            copied += 2 * nbytes * (len(processes) - 1)
            at += n_pieces
    return copied


#: Copies a rank's bytes to an address.
Fetch = Callable[[int, int], None]


class _Desk:
    """Where one rank reduces a block, in the order of the ranks.

    What is worked on should stay in the cache, and be gone through few times. So own
    elements are taken from where they are, and a mean is scaled once, after the sum.
    But a sum can overflow where the mean does not: then the block is reduced once more,
    scaled first, and that is the order too where the wire has half precision.

    Args:
        work: all that is going to be laid out.
        n_ranks: of the group.
        rank: this one.
        ufunc: combines two partial results.
        scale: factor for each term, or ``None``.
    """

    def __init__(
        self,
        work: Work,
        n_ranks: int,
        rank: int,
        ufunc: np.ufunc,
        scale: float | None,
    ) -> None:
        self._n_ranks = n_ranks
        self._rank = rank
        self._ufunc = ufunc
        self._scale = scale
        # Rows begin on cache lines: the sum so far, what comes next, own elements in
        # the wire's dtype, and raw bytes where the wire has another one.
        row_bytes = -(-work.most_bytes // 64) * 64
        self._memory = np.empty((4, row_bytes), np.uint8)
        # The pieces for raw bytes: of the sum, of what comes next, of own elements.
        self._table = np.empty((3, 2), np.uint64)
        self._pieces = [address_of(entry) for entry in self._table]
        self._kind: Any = None

    @property
    def result_piece(self) -> int:
        """Address of the piece that holds the result of short pieces."""
        return self._pieces[2]

    def lay_out(self, block: Block) -> None:
        """Make room for a block."""
        kind = (block.dtype, block.wire, block.n_elems)
        if kind == self._kind:
            return
        self._kind = kind
        self._same = block.dtype == block.wire
        wide = self._memory[:3, : block.n_elems * block.wire.itemsize]
        self._rows = list(wide.view(block.wire))
        raw_bytes = block.n_elems * block.dtype.itemsize
        if self._same:
            self._raws = self._rows
        else:
            self._raws = [self._memory[3, :raw_bytes].view(block.dtype)] * 3
        for entry, array in zip(self._table, self._raws, strict=True):
            entry[:] = address_of(array), raw_bytes
        self._scales_late = self._scale is not None and block.wire.itemsize >= 4

    def reduce(self, own: Sequence[Array] | None, fetch: Fetch) -> None:
        """Reduce a block over all ranks.

        Args:
            own: this rank's pieces, which get the result; ``None``: they are fetched
                as well, and the result goes to :attr:`result_piece`.
            fetch: copies the bytes of a rank's pieces to the piece at an address.
        """
        if not self._scales_late:
            self._put(own, self._sum(own, fetch, self._scale), None)
            return
        try:
            with np.errstate(over="raise"):
                total = self._sum(own, fetch, None, ends_in_own=False)
        except FloatingPointError:
            # Own elements are as they were; so are the other ranks'. Only where the sum
            # is not finite: else the neighbours of an element would change its bits.
            late = self._sum(own, fetch, None, ends_in_own=False)
            assert late is not None
            late = late * late.dtype.type(self._scale)
            total = self._sum(own, fetch, self._scale, ends_in_own=False)
            assert total is not None
            self._put(own, np.where(np.isfinite(late), late, total), None)
        else:
            self._put(own, total, self._scale)

    def _sum(
        self,
        own: Sequence[Array] | None,
        fetch: Fetch,
        scale: float | None,
        *,
        ends_in_own: bool = True,
    ) -> Array | None:
        """Add up all ranks' terms, each multiplied by ``scale``.

        Args:
            own: as in :meth:`reduce`.
            fetch: as in :meth:`reduce`.
            scale: factor, or ``None``.
            ends_in_own: the result may be put into own pieces at once.

        Returns:
            The sum; ``None`` if it is in the own pieces.
        """
        terms = self._own_terms(own, fetch, scale)
        goes_home = ends_in_own and own is not None and self._same
        left: Array | list[Array] | None = None
        for rank in range(self._n_ranks):
            right: Array | list[Array]
            if rank == self._rank:
                right = terms
            else:
                # The sum stays where the first term has come to.
                place = 1 if isinstance(left, np.ndarray) else 0
                row = right = self._rows[place]
                fetch(rank, self._pieces[place])
                self._widen(row, self._raws[place], scale)
            if left is None:
                left = right
                continue
            is_last = rank == self._n_ranks - 1
            # In the place of a term that is in the cache and not needed any more.
            total = left if isinstance(left, np.ndarray) else right
            assert isinstance(total, np.ndarray)
            out = own if goes_home and is_last else total
            assert out is not None
            self._combine(left, right, out)
            left = total
        if goes_home and self._n_ranks > 1:
            return None
        if isinstance(left, list):
            # Nobody else is there.
            return left[0] if len(left) == 1 else np.concatenate(left)
        return left

    def _own_terms(
        self, own: Sequence[Array] | None, fetch: Fetch, scale: float | None
    ) -> list[Array]:
        """Return own elements in the wire's dtype: where they are, or in a row."""
        row = self._rows[2]
        if own is None:
            fetch(self._rank, self._pieces[2])
            self._widen(row, self._raws[2], scale)
            return [row]
        if self._same and scale is None:
            return list(own)
        terms = list(_cut_like(own, row))
        for target, piece in zip(terms, own, strict=True):
            self._widen(target, piece, scale)
        return terms

    def _combine(
        self,
        left: Array | Sequence[Array],
        right: Array | Sequence[Array],
        out: Array | Sequence[Array],
    ) -> None:
        """Combine what is whole or in pieces; pieces have the same lengths."""
        pieces = next(
            (x for x in (left, right, out) if not isinstance(x, np.ndarray)), None
        )
        if pieces is None:
            self._ufunc(left, right, out=out)
            return
        for a, b, c in zip(
            *(
                _cut_like(pieces, x) if isinstance(x, np.ndarray) else x
                for x in (left, right, out)
            ),
            strict=True,
        ):
            self._ufunc(a, b, out=c)

    def _put(
        self, own: Sequence[Array] | None, total: Array | None, scale: float | None
    ) -> None:
        """Put the sum where the result belongs, scaled and in the arrays' dtype."""
        if total is None:
            return
        targets = [self._raws[2]] if own is None else own
        for target, source in zip(targets, _cut_like(targets, total), strict=True):
            if scale is not None:
                multiply(target, source, scale)
            elif target is not source:
                cast(target, source)

    def _widen(self, target: Array, source: Array, scale: float | None) -> None:
        """Cast to the wire's dtype, and scale."""
        if scale is not None:
            multiply(target, source, scale)
        elif not self._same or target is not source:
            cast(target, source)


def _cut_like(pieces: Sequence[Array], row: Array) -> Iterator[Array]:
    """Yield consecutive parts of a row that are as long as the pieces."""
    at = 0
    for piece in pieces:
        yield row[at : at + piece.size]
        at += piece.size
