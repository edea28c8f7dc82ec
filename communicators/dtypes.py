"""What each dtype becomes when it is reduced or travels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

#: A NumPy array of any shape and dtype.
Array = np.ndarray[Any, np.dtype[Any]]

#: Names of the reductions that array collectives know.
OPS = ("sum", "mean", "max", "min", "prod")

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}

#: dtype name -> dtype in which it is accumulated. Half precision is summed in
#: float32: the sum of a few large halves overflows before it can be divided.
_ACCUMULATED_AS = {"float16": "float32", "bfloat16": "float32"}

_WIRE_NAMES = ("float16", "bfloat16", "float32", "float64")


def check_op(op: str) -> str:
    """Return ``op`` if it is a known reduction.

    Raises:
        ValueError: unknown; the text lists the known ones.
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
    return op


def ufunc_of(op: str) -> np.ufunc:
    """Return the NumPy function that combines two partial results of ``op``."""
    return _UFUNCS[op]


def check_fixed_size(dtype: np.dtype[Any], operation: str) -> None:
    """Refuse dtypes whose items are references.

    Raises:
        TypeError: ``dtype`` holds Python objects.
    """
    if dtype.hasobject or dtype.kind == "T":
        raise TypeError(
            f"{operation}: arrays of dtype {dtype} hold Python objects; "
            f"use {operation}_obj for them"
        )


@functools.lru_cache(maxsize=256)
def result_dtype(dtype: np.dtype[Any], op: str, operation: str) -> np.dtype[Any]:
    """Return the dtype of a reduction's result.

    As in NumPy's own reductions, ``sum`` and ``prod`` of bool count in int64, and
    ``mean`` of integers and bool is float64; every other dtype is kept.

    Raises:
        TypeError: the dtype cannot be reduced by ``op``.
    """
    check_fixed_size(dtype, operation)
    if op == "mean" and dtype.kind in "biu":
        return np.dtype(np.float64)
    if op in ("sum", "prod") and dtype.kind == "b":
        return np.dtype(np.int64)
    scratch = np.zeros(1, dtype)
    try:
        kept = ufunc_of(op)(scratch, scratch).dtype == dtype.newbyteorder("=")
        if op == "mean":
            _ = scratch * 0.5
    except (TypeError, ValueError):
        kept = False
    if not kept:
        raise TypeError(f"{operation}: dtype {dtype} has no reduction {op!r}")
    return dtype


@functools.lru_cache(maxsize=256)
def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which arrays of ``dtype`` are summed."""
    return np.dtype(_ACCUMULATED_AS.get(dtype.name, dtype.newbyteorder("=")))


@functools.lru_cache(maxsize=256)
def wire_dtype(
    dtype: np.dtype[Any], allreduce_grad_dtype: np.dtype[Any] | None
) -> np.dtype[Any]:
    """Return the dtype in which arrays of ``dtype`` travel when they are averaged.

    ``allreduce_grad_dtype`` replaces real floating types only; integers and complex
    numbers travel as they are.
    """
    if allreduce_grad_dtype is not None and is_real_float(dtype):
        return allreduce_grad_dtype
    return accumulation_dtype(dtype)


def is_real_float(dtype: np.dtype[Any]) -> bool:
    """Tell whether ``dtype`` is a real floating type, bfloat16 included."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def parse_wire_dtype(value: object) -> np.dtype[Any] | None:
    """Read the option ``allreduce_grad_dtype``.

    Args:
        value: ``None``, or float16, bfloat16 (needs ml_dtypes), float32 or float64
            as a name, a scalar type or a NumPy dtype. The wire has the machine's byte
            order.

    Raises:
        ValueError: any other dtype, or bfloat16 without ml_dtypes.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "bfloat16":
        try:
            import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ValueError(
                "allreduce_grad_dtype 'bfloat16' on NumPy arrays needs ml_dtypes: "
                "pip install ml_dtypes"
            ) from error
        return np.dtype(ml_dtypes.bfloat16)
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in _WIRE_NAMES:
        raise ValueError(
            f"allreduce_grad_dtype {value!r}: expected None or one of "
            f"{', '.join(_WIRE_NAMES)}"
        )
    return dtype.newbyteorder("=")
