"""Packing arrays of any layout into a flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from communicators.buckets import Bucket
from communicators.dtypes import Array


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
        buffer: shape ``(bucket.n_elems,)``, dtype ``bucket.dtype``; overwritten.
        scale: factor, or ``None`` to copy unscaled.
    """
    for index, start, stop in _extents(bucket):
        array = arrays[index]
        if array is None:
            buffer[start:stop] = 0
            continue
        target = buffer[start:stop].reshape(array.shape)
        if scale is None:
            np.copyto(target, array, casting="unsafe")
        elif array.dtype == buffer.dtype:
            np.multiply(array, array.dtype.type(scale), out=target)
        else:
            # Multiply in the wider of the two types, so that neither a large half
            # nor a small double is lost before the cast.
            wide = np.promote_types(array.dtype, buffer.dtype)
            np.copyto(target, array.astype(wide) * wide.type(scale), casting="unsafe")


def unpack(bucket: Bucket, arrays: Sequence[Array | None], buffer: Array) -> None:
    """Copy ``buffer`` back into a bucket's arrays, cast to each one's dtype.

    Args:
        bucket: what lies where.
        arrays: all arrays; written in place whatever their layout.
        buffer: shape ``(bucket.n_elems,)``, dtype ``bucket.dtype``.
    """
    for index, start, stop in _extents(bucket):
        array = arrays[index]
        if array is not None:
            np.copyto(array, buffer[start:stop].reshape(array.shape), casting="unsafe")


def _extents(bucket: Bucket) -> list[tuple[int, int, int]]:
    stops = [*bucket.offsets[1:], bucket.n_elems]
    return list(zip(bucket.indices, bucket.offsets, stops, strict=True))
