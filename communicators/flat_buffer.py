"""Packing arrays of any layout into a flat buffer, and back.

The arithmetic, which the kernels for devices share bit for bit
(``communicators/devices/flat_buffer.cu``): an element is widened, multiplied and
rounded once, to nearest even, to the dtype of its destination. It is multiplied in
float64 where either dtype is that, and else in float32, so float16 and bfloat16 too.
Complex numbers are pairs of real ones. Numbers too large for the destination become
infinite, without a warning: gradients that overflow are for the caller to find.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from communicators.buckets import Bucket, Entry
from communicators.dtypes import Array, accumulation_dtype, is_real_float


def pack(
    bucket: Bucket,
    arrays: Sequence[Array | None],
    buffer: Array,
    scale: float | None = None,
) -> None:
    """Copy a bucket's arrays into ``buffer``, cast and scaled, in one pass.

    Elements are taken in C order, whatever the memory layout. Scaling comes before
    the cast: a half-precision wire then holds numbers that are already divided.

    Args:
        bucket: what goes where.
        arrays: all arrays; ``arrays[i]`` for ``i`` in ``bucket.indices`` is taken.
            ``None`` counts as zeros.
        buffer: shape ``(n,)``, ``n >= bucket.n_elems``, dtype ``bucket.dtype``;
            overwritten, with zeros behind the last array.
        scale: factor, or ``None`` to copy unscaled: bit for bit where the dtype stays.

    Raises:
        TypeError: a scale for integers.
    """
    zero = np.zeros((), buffer.dtype)
    with np.errstate(all="ignore"):
        for run in bucket.runs:
            if len(run) > 1 and _pack_at_once(run, arrays, buffer, scale):
                continue
            for index, start, stop, first in run:
                array = arrays[index]
                if array is None:
                    buffer[start:stop] = zero
                    continue
                target = buffer[start:stop]
                if array.size == target.size:
                    target = target.reshape(array.shape)
                else:
                    array = _flat(array)[first : first + target.size]
                if scale is None:
                    cast(target, array)
                else:
                    multiply(target, array, scale)
        if buffer.size > bucket.n_elems:
            buffer[bucket.n_elems :] = zero


def _pack_at_once(
    run: Sequence[Entry],
    arrays: Sequence[Array | None],
    buffer: Array,
    scale: float | None,
) -> bool:
    """Pack neighbours by two calls of NumPy; tell whether they are of that kind.

    Of the buffer's dtype and whole, so the bits are those of one after the other.
    """
    target = buffer[run[0][1] : run[-1][2]]
    parts = []
    for index, start, stop, _ in run:
        array = arrays[index]
        if array is None or array.size != stop - start:
            return False  # one is missing, or a piece of a larger array
        parts.append(array.reshape(-1))
    try:
        np.concatenate(parts, out=target, casting="no")
    except TypeError:
        return False  # one has another dtype
    if scale is not None:
        multiply(target, target, scale)
    return True


def unpack(bucket: Bucket, arrays: Sequence[Array | None], buffer: Array) -> None:
    """Copy ``buffer`` back into a bucket's arrays, cast to each one's dtype.

    Args:
        bucket: what lies where.
        arrays: all arrays; written in place whatever their layout. ``None`` is
            passed over.
        buffer: shape ``(n,)``, ``n >= bucket.n_elems``, dtype ``bucket.dtype``.
    """
    dtype = buffer.dtype
    with np.errstate(all="ignore"):
        for index, start, stop, first in bucket.entries:
            array = arrays[index]
            if array is None:
                continue
            source = buffer[start:stop]
            if array.size != stop - start:
                _unpack_piece(array, first, source)
            elif array.dtype == dtype:
                array[...] = source.reshape(array.shape)
            else:
                cast(array, source.reshape(array.shape))


def _unpack_piece(array: Array, first: int, source: Array) -> None:
    part = slice(first, first + source.size)
    if array.flags.c_contiguous:
        cast(array.reshape(-1)[part], source)
    else:
        narrow = np.empty(source.size, array.dtype)
        cast(narrow, source)
        array.flat[part] = narrow


def _flat(array: Array) -> Any:
    """Return the elements in C order, to be sliced: a view where that is possible."""
    return array.reshape(-1) if array.flags.c_contiguous else array.flat


def cast(target: Array, source: Array) -> None:
    """Copy ``source`` into ``target``, cast as the module says. Equal shapes."""
    if _rounds_twice(source.dtype, target.dtype):
        _round_once(target, source, 1.0)
    else:
        np.copyto(target, source, casting="unsafe")


def multiply(target: Array, source: Array, scale: float) -> None:
    """Write ``source * scale`` into ``target``, cast as the module says.

    Args:
        target: may be ``source``.
        source: of the same shape.
        scale: the factor.

    Raises:
        TypeError: integers.
    """
    kind = source.dtype.kind
    if kind in "biu":
        raise TypeError(f"pack: arrays of {source.dtype} cannot be scaled by {scale}")
    if kind == "c":
        # Not a complex product: an infinite part would turn the other into NaN.
        multiply(target.real, source.real, scale)
        multiply(target.imag, source.imag, scale)
    elif not is_real_float(source.dtype):
        np.multiply(source, scale, out=target, casting="unsafe")
    elif _rounds_twice(source.dtype, target.dtype):
        _round_once(target, source, scale)
    else:
        wide = _multiplied_in(source.dtype, target.dtype)
        # NumPy casts some thousand elements at a time: there are no large temporaries.
        np.multiply(source, wide.type(scale), out=target, dtype=wide, casting="unsafe")


@functools.cache
def _multiplied_in(source: np.dtype[Any], target: np.dtype[Any]) -> np.dtype[Any]:
    return np.promote_types(accumulation_dtype(source), accumulation_dtype(target))


@functools.cache
def _rounds_twice(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    # ml_dtypes casts by way of float32.
    return target.name == "bfloat16" and source.name == "float64"


def _round_once(target: Array, source: Array, scale: float) -> None:
    """Multiply float64 and cast to bfloat16 by way of float32, yet as if rounded once.

    The second rounding errs only where the first one ends half way between two
    bfloat16 numbers. Such a number is moved back towards where it came from.
    """
    pieces = np.nditer(
        [target, source],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["writeonly"], ["readonly"]],
        op_dtypes=[target.dtype, np.dtype(np.float64)],
    )
    with pieces:
        for narrow, piece in pieces:
            exact = piece * scale
            near = exact.astype(np.float32)
            bits = near.view(np.int32)
            (ties,) = np.nonzero(bits & 0xFFFF == 0x8000)
            lost = np.abs(exact[ties]) - np.abs(near[ties])
            bits[ties] += (lost > 0).astype(np.int32) - (lost < 0)
            np.copyto(narrow, near, casting="unsafe")
