"""Packing and unpacking on a device: one launch for all arrays of a bucket.

The kernels are in ``flat_buffer.cu``. They find their arrays in a *pointer table*,
one row of int64 an array (:func:`pointer_table`). Blocks take tiles of the flat buffer
in turn and look up what lies there, so that thousands of tiny arrays and one huge one
are divided alike.

The arithmetic is that of :mod:`communicators.flat_buffer`, bit for bit; only the
payload of a NaN that is scaled or cast to another dtype is the device's own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple, Protocol

import numpy as np

from communicators.buckets import Bucket

#: Threads of a block and elements of the buffer that a block takes at a time, as in
#: the kernels' source.
THREADS = 256
TILE = 2048

#: Most blocks of a launch for each multiprocessor of the device: what it holds at
#: once, several times over; blocks stride over the tiles beyond.
BLOCKS_PER_MULTIPROCESSOR = 32

#: Columns of the pointer table.
POINTER, LENGTH, OFFSET, TYPE = range(4)

#: dtype name -> type code of arrays that are cast; 0 is for those that are copied.
TYPE_CODES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}

_RAW = 0
_RAW_BYTES = (1, 2, 4, 8)
_CODE_BYTES = np.array([0, 2, 2, 4, 8])


class Launcher(Protocol):
    """Runs kernels: CuPy's ``RawModule`` on a device, a library on the host."""

    def launch(
        self, kernel_name: str, grid: int, block: int, args: Sequence[int | float]
    ) -> None:
        """Launch a kernel of :data:`KERNEL_NAMES` on the current stream.

        Args:
            kernel_name: its ``extern "C"`` name.
            grid: number of blocks, 1 to 2^31 - 1.
            block: number of threads of each.
            args: an int is a 64-bit integer or a pointer, a float is a float64.
        """


class _Unit(NamedTuple):
    """What the kernels take a dtype's elements for."""

    kernel: str
    code: int
    nbytes: int
    per_elem: int


def source() -> str:
    """Return the source of the kernels, which needs no header (C++14, CUDA)."""
    package = resources.files("communicators.devices")
    return package.joinpath("flat_buffer.cu").read_text(encoding="utf-8")


def _kernel_names() -> tuple[str, ...]:
    raw = [f"raw{nbytes}" for nbytes in _RAW_BYTES]
    return (
        *(f"pack_{name}" for name in (*TYPE_CODES, *raw)),
        *(f"pack_scaled_{name}" for name in TYPE_CODES),
        *(f"unpack_{name}" for name in (*TYPE_CODES, *raw)),
    )


#: All kernels of the source.
KERNEL_NAMES = _kernel_names()


def pointer_table(
    bucket: Bucket, arrays: Sequence[tuple[int, np.dtype[Any]] | None]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Describe a bucket's arrays to the kernels.

    Args:
        bucket: what goes where.
        arrays: entry ``i`` is address and dtype of array ``bucket.indices[i]``, which
            is C-contiguous; ``None`` where it is absent.

    Returns:
        int64 array of shape ``(n_arrays, 4)``: address (0: absent), number of
        elements, first element in the buffer, type code. Complex numbers count as
        two elements, and so do other items of 16 bytes.

    Raises:
        TypeError: an array's dtype cannot be cast to the bucket's, or the kernels do
            not know it.
        ValueError: an address is not a multiple of the item size, or the number of
            entries is not that of the bucket.
    """
    if len(arrays) != len(bucket.indices):
        raise ValueError(
            f"pointer_table: {len(arrays)} arrays for a bucket of {len(bucket.indices)}"
        )
    wire = _unit_of(bucket.dtype)
    table = np.empty((len(arrays), 4), np.int64)
    bounds = np.array([*bucket.offsets, bucket.n_elems], np.int64) * wire.per_elem
    table[:, OFFSET] = bounds[:-1]
    table[:, LENGTH] = bounds[1:] - bounds[:-1]
    table[:, POINTER] = [0 if array is None else array[0] for array in arrays]
    table[:, TYPE] = [
        wire.code if array is None else _code(array[1], bucket.dtype)
        for array in arrays
    ]
    misaligned = table[:, POINTER] % _unit_bytes(table, wire) != 0
    if misaligned.any():
        row = int(misaligned.argmax())
        raise ValueError(
            f"pointer_table: array {bucket.indices[row]} is at address "
            f"{table[row, POINTER]:#x}, which is not a multiple of its item size"
        )
    return table


def present_bytes(
    table: np.ndarray[Any, np.dtype[np.int64]], wire_dtype: np.dtype[Any]
) -> int:
    """Return the bytes of a pointer table's arrays without the absent ones."""
    lengths = np.where(table[:, POINTER] == 0, 0, table[:, LENGTH])
    return int(np.sum(lengths * _unit_bytes(table, _unit_of(wire_dtype))))


class FlatBufferKernels:
    """Launches the kernels and counts what they move.

    Buffer and table lie where the launcher's kernels can read them. Launches are
    asynchronous where the launcher's are.

    Args:
        launcher: runs the kernels.
        n_multiprocessors: of the device; bounds the number of blocks.

    Attributes:
        n_launches (int): launches so far.
        n_bytes (int): bytes of arrays and buffers read and written so far. Those of
            a bucket's arrays are counted as the caller gives them.
    """

    def __init__(self, launcher: Launcher, n_multiprocessors: int) -> None:
        self._launcher = launcher
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * n_multiprocessors
        self.n_launches = 0
        self.n_bytes = 0

    def pack(
        self,
        table_pointer: int,
        n_arrays: int,
        buffer_pointer: int,
        n_elems: int,
        wire_dtype: np.dtype[Any],
        scale: float | None = None,
        *,
        array_bytes: int,
    ) -> None:
        """Fill a flat buffer with a bucket's arrays, scaled and cast.

        Absent arrays and what follows the last array become zeros.

        Args:
            table_pointer: address of a :func:`pointer_table`.
            n_arrays: its number of rows.
            buffer_pointer: address of the buffer, a multiple of the item size.
            n_elems: length of the buffer in elements of ``wire_dtype``; at least the
                bucket's.
            wire_dtype: dtype of the buffer and of the bucket.
            scale: factor, or ``None`` for a pure cast.
            array_bytes: what :func:`present_bytes` says, for the counter.

        Raises:
            TypeError: a dtype that is neither floating nor complex has no scale.
        """
        unit = _unit_of(wire_dtype)
        if scale is None:
            kernel = f"pack_{unit.kernel}"
        elif unit.code == _RAW:
            raise TypeError(f"pack: arrays of {wire_dtype} cannot be scaled")
        else:
            kernel = f"pack_scaled_{unit.kernel}"
        args = (table_pointer, n_arrays, buffer_pointer, n_elems * unit.per_elem)
        factor = 1.0 if scale is None else float(scale)
        self._launch(kernel, (*args, factor), n_elems, wire_dtype, array_bytes)

    def unpack(
        self,
        table_pointer: int,
        n_arrays: int,
        buffer_pointer: int,
        n_elems: int,
        wire_dtype: np.dtype[Any],
        *,
        array_bytes: int,
    ) -> None:
        """Copy a flat buffer back into a bucket's arrays, cast to each one's dtype.

        Absent arrays are passed over. The arguments are those of :meth:`pack`.
        """
        unit = _unit_of(wire_dtype)
        args = (table_pointer, n_arrays, buffer_pointer, n_elems * unit.per_elem)
        self._launch(f"unpack_{unit.kernel}", args, n_elems, wire_dtype, array_bytes)

    def _launch(
        self,
        kernel: str,
        args: Sequence[int | float],
        n_elems: int,
        wire_dtype: np.dtype[Any],
        array_bytes: int,
    ) -> None:
        if n_elems == 0:
            return
        n_tiles = -(-n_elems * _unit_of(wire_dtype).per_elem // TILE)
        grid = min(n_tiles, self._most_blocks)
        self._launcher.launch(kernel, grid, THREADS, args)
        self.n_launches += 1
        self.n_bytes += array_bytes + n_elems * wire_dtype.itemsize


@functools.lru_cache(maxsize=256)
def _unit_of(dtype: np.dtype[Any]) -> _Unit:
    if dtype.isnative and not dtype.hasobject:
        if dtype.name in TYPE_CODES:
            return _Unit(dtype.name, TYPE_CODES[dtype.name], dtype.itemsize, 1)
        if dtype.name in ("complex64", "complex128"):
            return _unit_of(np.empty(0, dtype).real.dtype)._replace(per_elem=2)
        if dtype.itemsize in _RAW_BYTES:
            return _Unit(f"raw{dtype.itemsize}", _RAW, dtype.itemsize, 1)
        if dtype.itemsize == 16:
            return _Unit("raw8", _RAW, 8, 2)
    raise TypeError(
        f"arrays of {dtype} cannot be packed on a device: expected native numbers, or "
        "items of 1, 2, 4, 8 or 16 bytes"
    )


@functools.lru_cache(maxsize=256)
def _code(dtype: np.dtype[Any], wire_dtype: np.dtype[Any]) -> int:
    unit, wire = _unit_of(dtype), _unit_of(wire_dtype)
    casts = unit.code != _RAW and wire.code != _RAW and unit.per_elem == wire.per_elem
    if dtype != wire_dtype and not casts:
        raise TypeError(f"arrays of {dtype} are not cast to {wire_dtype} on a device")
    return unit.code


def _unit_bytes(
    table: np.ndarray[Any, np.dtype[np.int64]], wire: _Unit
) -> np.ndarray[Any, np.dtype[np.int64]]:
    if wire.code == _RAW:
        return np.full(len(table), wire.nbytes, np.int64)
    nbytes: np.ndarray[Any, np.dtype[np.int64]] = _CODE_BYTES[table[:, TYPE]]
    return nbytes
