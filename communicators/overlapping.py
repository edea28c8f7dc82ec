"""Arrays that share memory, though each is given as one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1
    from numpy import byte_bounds  # type: ignore[attr-defined,no-redef]


def overlapping(arrays: Sequence[Any]) -> list[int]:
    """Return which arrays begin in memory that an earlier one reaches into.

    Args:
        arrays: in host memory; ``None`` is passed over.
    """
    bounds = []
    for i, array in enumerate(arrays):
        if array is not None and array.size:
            if array.flags.c_contiguous:
                start = array.__array_interface__["data"][0]
                bounds.append((start, start + array.nbytes, i))
            else:
                bounds.append((*byte_bounds(array), i))
    bounds.sort()
    found, end = [], 0
    for start, stop, i in bounds:
        if start < end:
            found.append(i)
        end = max(end, stop)
    return found
