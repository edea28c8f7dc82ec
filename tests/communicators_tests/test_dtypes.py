"""What dtypes become in reductions and on the wire."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from communicators.dtypes import (
    accumulation_dtype,
    check_op,
    parse_wire_dtype,
    result_dtype,
    wire_dtype,
)


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        ("f2", "sum", "f2"),
        ("f4", "mean", "f4"),
        ("i2", "sum", "i2"),
        ("i2", "mean", "f8"),
        ("?", "sum", "i8"),
        ("?", "max", "?"),
        ("c8", "mean", "c8"),
        (">f4", "sum", ">f4"),
        ("m8[s]", "sum", "m8[s]"),
        ("M8[s]", "max", "M8[s]"),
    ],
)
def test_result_dtype_is_kept_but_for_numpys_rules(dtype, op, expected):
    assert result_dtype(np.dtype(dtype), op, "allreduce") == np.dtype(expected)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("U3", "sum"), ("S2", "max"), ("M8[s]", "sum"), ("O", "sum"), ("i4,f4", "sum")],
)
def test_dtypes_without_the_reduction_are_refused(dtype, op):
    with pytest.raises(TypeError, match="allreduce"):
        result_dtype(np.dtype(dtype), op, "allreduce")


def test_half_precision_accumulates_in_float32():
    assert accumulation_dtype(np.dtype("f2")) == np.float32
    assert accumulation_dtype(np.dtype("f8")) == np.float64


def test_wire_dtype_replaces_real_floats_only():
    half = np.dtype("f2")
    assert wire_dtype(np.dtype("f4"), half) == half
    assert wire_dtype(np.dtype("i4"), half) == np.int32
    assert wire_dtype(np.dtype("c8"), half) == np.complex64
    assert wire_dtype(half, None) == np.float32


@pytest.mark.parametrize(
    "value", ["int32", "nonsense", "complex64", ml_dtypes.float8_e4m3, object()]
)
def test_other_wire_dtypes_are_refused(value):
    with pytest.raises(ValueError, match="allreduce_grad_dtype"):
        parse_wire_dtype(value)


@pytest.mark.parametrize("value", ["float16", np.float16, np.dtype("f8")])
def test_wire_dtypes_by_name_class_or_dtype(value):
    assert parse_wire_dtype(value) == np.dtype(value)


@pytest.mark.parametrize(
    "value", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)], ids=repr
)
def test_bfloat16_by_name_class_or_dtype(value):
    assert parse_wire_dtype(value) == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("value", [">f2", "<f2", np.dtype(">f8")])
def test_the_wire_has_the_byte_order_of_the_machine(value):
    wire = parse_wire_dtype(value)
    assert wire.isnative
    assert wire.name == np.dtype(value).name


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_bfloat16_is_a_floating_type(op):
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    assert result_dtype(bfloat16, op, "allreduce") == bfloat16
    assert wire_dtype(bfloat16, None) == np.float32
    assert wire_dtype(bfloat16, np.dtype("f2")) == np.float16


def test_unknown_op_lists_the_known_ones():
    with pytest.raises(ValueError, match="sum, mean, max, min, prod"):
        check_op("average")
