"""Which arrays travel together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from communicators.devices.kinds import CPU, GPU, kind_of

#: Arrays of up to this many bytes are packed together: for those the calls cost more
#: than the bytes.
JOINED_ARRAY_BYTES = 16 * 1024
#: Bytes of those that are packed at once; they stay in the cache.
JOINED_BYTES = 128 * 1024

#: Bytes of a bucket on the wire. Large enough to amortise the latency of a
#: reduction, small enough that several are in flight at once and stay in cache.
DEFAULT_BUCKET_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class ArraySpec:
    """Shape, dtype and kind of memory of an array that a rank does not hold.

    Stands for a missing array in ``allreduce_arrays``.

    Attributes:
        shape: as NumPy has it.
        dtype: as NumPy has it.
        kind: ``"cpu"`` (NumPy) or ``"gpu"`` (CuPy).
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: str = CPU

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @classmethod
    def of(cls, array: Any) -> ArraySpec:
        """Return the spec of an array, or the spec itself."""
        if isinstance(array, cls):
            return array
        return cls(array.shape, array.dtype, kind_of(array) or CPU)

    @property
    def n_elems(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.n_elems * self.dtype.itemsize

    def __str__(self) -> str:
        where = " on a GPU" if self.kind == GPU else ""
        return f"shape {self.shape} {self.dtype}{where}"


#: One array in a bucket: its index, start and stop in the buffer, and which of its
#: elements comes first.
Entry = tuple[int, int, int, int]


@dataclass
class Bucket:
    """Arrays of one wire dtype that are packed into one flat buffer.

    Attributes:
        dtype: dtype of the flat buffer.
        indices: which arrays, in packing order.
        offsets: first element of each array in the buffer.
        starts: first element of each array that is in the buffer, in C order: 0, but
            for the pieces of large arrays.
        n_elems: length of the buffer in elements.
    """

    dtype: np.dtype[Any]
    indices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    n_elems: int = 0
    # Derived from the above when they are asked for.
    _entries: list[Entry] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _runs: list[list[Entry]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def entries(self) -> list[Entry]:
        """What lies where, in packing order."""
        if len(self._entries) != len(self.indices):
            stops = [*self.offsets[1:], self.n_elems]
            self._entries = list(
                zip(self.indices, self.offsets, stops, self.starts, strict=True)
            )
            self._runs = list(self._joined(self._entries))
        return self._entries

    @property
    def runs(self) -> list[list[Entry]]:
        """The entries, in groups to be packed at once: many small ones, or one."""
        return self._runs if self.entries else []

    def _joined(self, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        run: list[Entry] = []
        for entry in entries:
            _, start, stop, _ = entry
            is_small = (stop - start) * self.dtype.itemsize <= JOINED_ARRAY_BYTES
            if run and (
                not is_small or (stop - run[0][1]) * self.dtype.itemsize > JOINED_BYTES
            ):
                yield run
                run = []
            run.append(entry)
            if not is_small:
                yield run
                run = []
        if run:
            yield run

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.n_elems * self.dtype.itemsize

    def append(self, index: int, n_elems: int, start: int = 0) -> None:
        """Add one array at the end, or its ``n_elems`` elements from ``start``."""
        self.indices.append(index)
        self.offsets.append(self.n_elems)
        self.starts.append(start)
        self.n_elems += n_elems


def plan_buckets(
    sizes: Sequence[tuple[int, int, np.dtype[Any]]],
    bucket_bytes: int,
    *,
    cuts: bool = False,
    groups: Sequence[int] = (),
) -> list[Bucket]:
    """Group arrays into buckets; the same input gives the same plan on every rank.

    Arrays keep their order. Each wire dtype has one open bucket, which is closed
    when the next array would exceed ``bucket_bytes``; a larger array has a bucket
    of its own, or several. Empty arrays are left out.

    Args:
        sizes: ``(index, n_elems, wire dtype)`` of each array.
        bucket_bytes: upper bound; 0 puts every array into its own bucket.
        cuts: whether arrays larger than that are cut; else theirs is larger too.
        groups: lengths of groups of consecutive numbers ``index``; no bucket has
            arrays of two.

    Returns:
        list[Bucket]: in the order in which they were begun.
    """
    buckets: list[Bucket] = []
    open_bucket: dict[np.dtype[Any], Bucket] = {}
    ends = list(itertools.accumulate(groups))
    for index, n_elems, dtype in sizes:
        while ends and index >= ends[0]:
            del ends[0]
            open_bucket.clear()
        if n_elems == 0:
            continue
        most = n_elems
        if cuts and bucket_bytes:
            most = max(1, bucket_bytes // dtype.itemsize)
        for start in range(0, n_elems, most):
            n = min(most, n_elems - start)
            bucket = open_bucket.get(dtype)
            if bucket is None or bucket.nbytes + n * dtype.itemsize > bucket_bytes:
                bucket = open_bucket[dtype] = Bucket(dtype)
                buckets.append(bucket)
            bucket.append(index, n, start)
    return buckets
