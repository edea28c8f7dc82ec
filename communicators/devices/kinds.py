"""Telling host arrays from device arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

CPU = "cpu"
GPU = "gpu"


def kind_of(array: object) -> str | None:
    """Return ``"cpu"``, ``"gpu"``, or ``None`` for what is no array.

    Device arrays are those of CuPy and of whatever else tells its memory by
    ``__cuda_array_interface__`` (version 3 of the protocol, as Numba defines it).
    """
    if isinstance(array, np.ndarray | np.generic):
        return CPU
    # Asked of the class: CuPy builds the interface anew each time that it is read.
    if hasattr(type(array), "__cuda_array_interface__"):
        return GPU
    return None


def as_array(item: object, operation: str, hint: str = "") -> Any:
    """Return ``item`` as an array of NumPy or CuPy, without copying.

    NumPy scalars count as zero-dimensional arrays.

    Args:
        item: the array.
        operation: for errors.
        hint: what to do with what is no array; ends the error's text.

    Raises:
        TypeError: no array, or a masked one.
    """
    kind = kind_of(item)
    if isinstance(item, np.ma.MaskedArray):
        raise TypeError(
            f"{operation}: a masked array would lose its mask; fill it{hint}"
        )
    if kind == CPU:
        return np.asarray(item)
    if kind == GPU:
        return _cupy_view(item, operation)
    raise TypeError(
        f"{operation}: expected a NumPy or CuPy array; got "
        f"{type(item).__module__}.{type(item).__qualname__}{hint}"
    )


def common_kind(kinds: set[str], operation: str) -> str:
    """Return the one kind of all arrays of a call; ``"cpu"`` without any.

    Raises:
        TypeError: both kinds; they travel on different roads.
    """
    if len(kinds) > 1:
        raise TypeError(
            f"{operation}: CPU (NumPy) and GPU (CuPy) arrays are mixed in one call; "
            "move them to one side, or make a call for each"
        )
    return kinds.pop() if kinds else CPU


def _cupy_view(item: object, operation: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{operation}: got a GPU array of {type(item).__module__}, and CuPy, which "
            f"takes it further, cannot be imported ({error})"
        ) from error
    if isinstance(item, cupy.ndarray):
        return item
    try:
        return cupy.asarray(item)
    except Exception as error:
        # Whatever a foreign object, or CuPy without a driver, raises.
        raise TypeError(
            f"{operation}: CuPy cannot take the GPU array of {type(item).__module__}."
            f"{type(item).__qualname__} ({type(error).__name__}: {error})"
        ) from error
