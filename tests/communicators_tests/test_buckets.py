"""Planning buckets, packing and unpacking: pure functions."""

from __future__ import annotations

import numpy as np
import pytest

from communicators.buckets import ArraySpec, Bucket, plan_buckets
from communicators.flat_buffer import pack, unpack

F4 = np.dtype("f4")
F8 = np.dtype("f8")


def test_arrays_fill_buckets_in_order():
    plan = plan_buckets([(0, 3, F4), (1, 2, F4), (2, 4, F4)], bucket_bytes=20)
    assert [bucket.indices for bucket in plan] == [[0, 1], [2]]
    assert [bucket.offsets for bucket in plan] == [[0, 3], [0]]
    assert [bucket.nbytes for bucket in plan] == [20, 16]


def test_each_dtype_has_its_own_buckets():
    plan = plan_buckets([(0, 1, F4), (1, 1, F8), (2, 1, F4)], bucket_bytes=100)
    assert [(b.dtype, b.indices) for b in plan] == [(F4, [0, 2]), (F8, [1])]


def test_zero_bytes_put_every_array_into_a_bucket_of_its_own():
    plan = plan_buckets([(0, 1, F4), (1, 1, F4)], bucket_bytes=0)
    assert [bucket.indices for bucket in plan] == [[0], [1]]


def test_a_large_array_has_a_bucket_and_an_empty_one_has_none():
    plan = plan_buckets([(0, 0, F4), (1, 1000, F4), (2, 1, F4)], bucket_bytes=8)
    assert [bucket.indices for bucket in plan] == [[1], [2]]


def test_large_arrays_are_cut_where_that_is_allowed():
    sizes = [(0, 1, F4), (1, 5, F4), (2, 1, F4)]
    plan = plan_buckets(sizes, bucket_bytes=8, cuts=True)
    assert [bucket.indices for bucket in plan] == [[0], [1], [1], [1, 2]]
    assert [bucket.starts for bucket in plan] == [[0], [0], [2], [4, 0]]
    assert all(bucket.nbytes <= 8 for bucket in plan)
    whole = plan_buckets(sizes, bucket_bytes=0, cuts=True)
    assert [bucket.indices for bucket in whole] == [[0], [1], [2]]


def test_no_bucket_holds_arrays_of_two_groups():
    sizes = [(i, 1, F4) for i in range(6) if i != 4]
    plan = plan_buckets(sizes, bucket_bytes=100, groups=[2, 0, 1, 3])
    assert [bucket.indices for bucket in plan] == [[0, 1], [2], [3, 5]]


LAYOUTS = {
    "c": lambda a: a.copy(),
    "fortran": np.asfortranarray,
    "sliced": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "transposed": lambda a: a.T.copy().T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_pieces_of_any_layout_are_packed_and_unpacked(layout, scale):
    array = LAYOUTS[layout](np.arange(12, dtype="f2").reshape(3, 4))
    plan = plan_buckets([(0, 12, F4)], bucket_bytes=20, cuts=True)
    assert [bucket.starts for bucket in plan] == [[0], [5], [10]]
    buffers = [np.empty(bucket.n_elems, "f4") for bucket in plan]
    for bucket, buffer in zip(plan, buffers, strict=True):
        pack(bucket, [array], buffer, scale)
    whole = np.concatenate(buffers)
    assert whole.tolist() == (np.arange(12) * (scale or 1)).tolist()
    for bucket, buffer in zip(plan, buffers, strict=True):
        unpack(bucket, [array], buffer + 1)
    assert array.dtype == "f2"
    assert array.ravel().tolist() == (whole + 1).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4"])
def test_packing_takes_c_order_and_unpacking_restores_any_layout(layout, dtype):
    array = LAYOUTS[layout](np.arange(12, dtype=dtype).reshape(3, 4))
    scalar = np.array(7, dtype)
    bucket = Bucket(F8)
    bucket.append(0, 12)
    bucket.append(1, 1)
    buffer = np.full(13, np.nan)
    pack(bucket, [array, scalar], buffer)
    assert buffer.tolist() == [*range(12), 7]
    unpack(bucket, [array, scalar], buffer + 1)
    assert array.dtype == dtype
    assert array.tolist() == (np.arange(12).reshape(3, 4) + 1).tolist()
    assert scalar == 8


def test_scaling_precedes_the_cast_to_a_narrow_wire():
    bucket = Bucket(np.dtype("f2"))
    bucket.append(0, 1)
    buffer = np.empty(1, "f2")
    pack(bucket, [np.array([100000.0], "f4")], buffer, scale=0.25)
    assert buffer[0] == 25000


def test_scaling_a_large_half_on_a_wide_wire_keeps_it_finite():
    bucket = Bucket(F4)
    bucket.append(0, 1)
    buffer = np.empty(1, "f4")
    pack(bucket, [np.array([40000.0], "f2")], buffer, scale=0.5)
    assert buffer[0] == 20000


def test_a_missing_array_is_packed_as_zeros():
    bucket = Bucket(F4)
    bucket.append(0, 2)
    buffer = np.full(2, 5, "f4")
    pack(bucket, [None], buffer)
    assert buffer.tolist() == [0, 0]


def test_spec_of_an_array():
    spec = ArraySpec.of(np.empty((2, 0, 3), "f4"))
    assert (spec.shape, spec.n_elems, spec.nbytes) == ((2, 0, 3), 0, 0)
    assert ArraySpec.of(spec) is spec
    assert ArraySpec((), "f8").n_elems == 1  # type: ignore[arg-type]
