"""Numbers at which conversions between floating types go wrong first."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def all_patterns(dtype: np.dtype[Any]) -> np.ndarray:
    """Return every number of a 16-bit type, in the order of the bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def positive_numbers(dtype: np.dtype[Any]) -> np.ndarray:
    """Return the finite numbers of a 16-bit type from 0 up, and one more, in float64.

    The last is what would follow the largest if there were one exponent more: what
    is nearer to it becomes infinite.
    """
    patterns = np.arange(1 << 15, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        numbers = patterns.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return np.append(numbers, 2 * numbers[-1] - numbers[-2])


def rounding_borders(wide: np.dtype[Any], narrow: np.dtype[Any]) -> np.ndarray:
    """Return numbers of ``wide`` half way between two of ``narrow``, and beside that.

    Args:
        wide: float32 or float64.
        narrow: a 16-bit type.
    """
    numbers = positive_numbers(narrow)
    halves = ((numbers[:-1] + numbers[1:]) / 2).astype(wide)
    beside = [np.nextafter(halves, wide.type(to)) for to in (0, np.inf)]
    positive = np.concatenate([halves, *beside])
    return np.concatenate([positive, -positive])


def telling_numbers(dtype: np.dtype[Any], random: np.random.RandomState) -> np.ndarray:
    """Return numbers of a floating type that are worth being cast to the others.

    All of a 16-bit type; for the wider ones the borders of the narrower ones and
    random bits.
    """
    if dtype.itemsize == 2:
        return all_patterns(dtype)
    narrow = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
    parts = [rounding_borders(dtype, n) for n in narrow]
    if dtype == np.float64:
        singles = np.frombuffer(random.bytes(4 * 50_000), np.float32)
        with np.errstate(all="ignore"):
            after = np.nextafter(singles, np.float32(np.inf))
            halves = (singles.astype(np.float64) + after) / 2
            parts += [halves, np.nextafter(halves, 0), np.nextafter(halves, np.inf)]
    parts.append(np.frombuffer(random.bytes(dtype.itemsize * 50_000), dtype))
    return np.concatenate(parts)


def nearest_bits(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Round float64 to a 16-bit type, ties to even; return its bits.

    Slow and plain: the two neighbours are looked up in the table of all numbers. No
    NaNs.
    """
    numbers = positive_numbers(dtype)
    size = np.abs(values)
    below = np.searchsorted(numbers, size, side="right") - 1
    below = np.minimum(below, len(numbers) - 2)
    half = (numbers[below] + numbers[below + 1]) / 2
    up = (size > half) | ((size == half) & (below % 2 == 1))
    return (below + up + (np.signbit(values) << 15)).astype(np.uint16)
