"""Comparing the pack and unpack kernels with their twin for NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from communicators import flat_buffer
from communicators.buckets import Bucket
from communicators.devices.flat_buffer_kernels import (
    FlatBufferKernels,
    pointer_table,
    present_bytes,
)
from host_kernels.memory import GUARD, Layout, Memory

FLOATS = [np.dtype(t) for t in ("f2", ml_dtypes.bfloat16, "f4", "f8")]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
RAW = [np.dtype(t) for t in ("?", "u1", "i2", "u4", "i8", "M8[s]", "V16")]


@dataclasses.dataclass
class Case:
    """A bucket, its arrays and where they lie.

    Attributes:
        wire: dtype of the buffer.
        arrays: contents, one-dimensional.
        present: which of them the rank has; all by default.
        shifts: elements by which each begins behind an alignment; 0 by default.
        scale: factor of packing.
        n_padding: elements of the buffer behind the last array.
        buffer_shift: as ``shifts``, for the buffer.
    """

    wire: np.dtype[Any]
    arrays: list[np.ndarray]
    present: list[bool] = dataclasses.field(default_factory=list)
    shifts: list[int] = dataclasses.field(default_factory=list)
    scale: float | None = None
    n_padding: int = 0
    buffer_shift: int = 0

    def check(self, kernels: FlatBufferKernels, memory: Memory) -> None:
        """Pack, then unpack other numbers; compare all bytes, and the counters."""
        placed = _Placed(self, memory)
        for way in ("pack", "unpack"):
            before = placed.fill(np.random.RandomState(len(self.arrays)))
            n_launches, n_bytes = kernels.n_launches, kernels.n_bytes
            if way == "pack":
                kernels.pack(*placed.args, self.scale, array_bytes=placed.array_bytes)
            else:
                kernels.unpack(*placed.args, array_bytes=placed.array_bytes)
            after = memory.download()
            placed.compare(way, before, after)
            n_launched = int(placed.n_elems > 0)
            assert kernels.n_launches == n_launches + n_launched
            moved = placed.array_bytes + placed.n_elems * self.wire.itemsize
            assert kernels.n_bytes == n_bytes + n_launched * moved


class _Placed:
    """A case in memory."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self._case = case
        self._memory = memory
        arrays = case.arrays
        shifts = case.shifts or [0] * len(arrays)
        self._present = case.present or [True] * len(arrays)
        self._bucket = Bucket(case.wire)
        for index, array in enumerate(arrays):
            self._bucket.append(index, array.size)
        self.n_elems = self._bucket.n_elems + case.n_padding
        self._layout = Layout()
        self._table_at = self._layout.add(32 * len(arrays))
        self._arrays_at = [
            self._layout.add(array.nbytes, shift * array.itemsize)
            for array, shift in zip(arrays, shifts, strict=True)
        ]
        item = case.wire.itemsize
        self._buffer_at = self._layout.add(
            self.n_elems * item, case.buffer_shift * item
        )
        address = memory.allocate(self._layout.nbytes)
        self._table = pointer_table(
            self._bucket,
            [
                (address + at.start, array.dtype) if is_present else None
                for at, array, is_present in zip(
                    self._arrays_at, arrays, self._present, strict=True
                )
            ],
        )
        self.args = (
            address + self._table_at.start,
            len(arrays),
            address + self._buffer_at.start,
            self.n_elems,
            case.wire,
        )
        self.array_bytes = present_bytes(self._table, case.wire)

    def fill(self, random: np.random.RandomState) -> np.ndarray:
        """Write table, arrays and a buffer of random bits; return the block."""
        block = np.full(self._layout.nbytes, GUARD, np.uint8)
        block[self._table_at] = self._table.view(np.uint8).reshape(-1)
        for at, array in zip(self._arrays_at, self._case.arrays, strict=True):
            block[at] = array.view(np.uint8)
        block[self._buffer_at] = random_bits(
            random, self.n_elems, self._case.wire
        ).view(np.uint8)
        self._memory.upload(block, self._layout.guards())
        return block

    def compare(self, way: str, before: np.ndarray, after: np.ndarray) -> None:
        """Do the same by the twin, and compare."""
        expected = before.copy()
        arrays, buffer = self._views(expected)
        if way == "pack":
            flat_buffer.pack(self._bucket, arrays, buffer, self._case.scale)
        else:
            flat_buffer.unpack(self._bucket, arrays, buffer)
        is_scaled = way == "pack" and self._case.scale is not None
        got_arrays, got_buffer = self._views(after)
        starts = [*self._bucket.offsets, self._bucket.n_elems]
        for i, array in enumerate(self._case.arrays):
            if is_scaled or array.dtype != self._case.wire:
                part = slice(starts[i], starts[i + 1])
                _ignore_payloads(got_buffer[part], buffer[part])
                if arrays[i] is not None:
                    _ignore_payloads(got_arrays[i], arrays[i])
        wrong = np.flatnonzero(after != expected)
        assert wrong.size == 0, (
            f"{way}: {wrong.size} wrong bytes, the first at {wrong[0]}: "
            f"table {self._table_at}, arrays {self._arrays_at[:20]}, "
            f"buffer {self._buffer_at}"
        )

    def _views(self, block: np.ndarray) -> tuple[list[Any], np.ndarray]:
        arrays = [
            block[at].view(array.dtype) if is_present else None
            for at, array, is_present in zip(
                self._arrays_at, self._case.arrays, self._present, strict=True
            )
        ]
        return arrays, block[self._buffer_at].view(self._case.wire)


def _ignore_payloads(got: Any, expected: Any) -> None:
    """Make NaNs in the same places the same, down to their bits."""
    if got.dtype.kind == "c":
        got, expected = (x.view(x.real.dtype) for x in (got, expected))
    # ml_dtypes tells of the signalling ones.
    with np.errstate(invalid="ignore"):
        both = np.isnan(got) & np.isnan(expected)
    got[both] = expected[both] = np.nan


def random_bits(
    random: np.random.RandomState, n_elems: int, dtype: np.dtype[Any]
) -> np.ndarray:
    """Return an array of any bits: NaNs, infinities and subnormal numbers too."""
    if dtype.kind == "b":
        return random.randint(0, 2, n_elems).astype(dtype)
    return np.frombuffer(bytearray(random.bytes(n_elems * dtype.itemsize)), dtype)


def random_case(random: np.random.RandomState) -> Case:
    """Return a case with anything in it that the interface allows."""
    kinds = [(wire, FLOATS) for wire in FLOATS]
    kinds += [(wire, [wire]) for wire in RAW] + [(wire, COMPLEX) for wire in COMPLEX]
    wire, dtypes = kinds[random.randint(len(kinds))]
    sizes = [0, 1, 2, 7, 255, 256, 2047, 2048, 2049, 5000, 9000]
    n_arrays = int(random.choice([0, 1, 2, 3, 5, 40]))
    arrays = [
        random_bits(random, random.choice(sizes), dtypes[random.randint(len(dtypes))])
        for _ in range(n_arrays)
    ]
    scales = [None, 1 / 3, 0.25, 7.7, 1e-30, 1e300]
    return Case(
        wire,
        arrays,
        present=(random.rand(n_arrays) < 0.8).tolist(),
        shifts=random.choice([0, 0, 1, 2, 3, 4, 5], n_arrays).tolist(),
        scale=None if wire in RAW else scales[random.randint(len(scales))],
        n_padding=int(random.choice([0, 0, 1, 2048, 5000])),
        buffer_shift=int(random.choice([0, 0, 1, 2, 4])),
    )
