"""Packing NumPy arrays: the arithmetic of casts and scales."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from host_kernels.floats import nearest_bits, rounding_borders, telling_numbers

from communicators.buckets import Bucket
from communicators.flat_buffer import pack, unpack

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [*HALVES, np.dtype("f4"), np.dtype("f8")]
pairs = pytest.mark.parametrize(
    ("source", "wire"),
    [(s, w) for s in FLOATS for w in FLOATS],
    ids=lambda dtype: dtype.name,
)


def packed(array: np.ndarray, wire: np.dtype, scale: float | None = None) -> np.ndarray:
    """Pack one array alone."""
    bucket = Bucket(wire)
    bucket.append(0, array.size)
    buffer = np.empty(array.size, wire)
    pack(bucket, [array], buffer, scale)
    return buffer


def bits_of(array: np.ndarray) -> np.ndarray:
    """Return the bits of an array of a 16-bit type."""
    return array.view(np.uint16)


@pytest.mark.parametrize("wire", HALVES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("source", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("scale", [None, 1 / 3, 0.25, 3.0])
def test_a_half_is_the_nearest_one_to_the_product(source, wire, scale):
    numbers = telling_numbers(source, np.random.RandomState(0))
    with np.errstate(all="ignore"):
        exact = numbers.astype("f8")
        if scale is not None and source == "f8":
            exact = exact * scale
        elif scale is not None:
            exact = (exact.astype("f4") * np.float32(scale)).astype("f8")
    nan = np.isnan(exact)
    got = packed(numbers, wire, scale)
    with np.errstate(invalid="ignore"):
        assert np.isnan(got[nan]).all()
    keep_bits = scale is None and source == wire
    expected = np.where(nan, 0, nearest_bits(np.where(nan, 0, exact), wire))
    assert (bits_of(got)[~nan] == expected[~nan]).all()
    assert not keep_bits or (bits_of(got) == bits_of(numbers)).all()


def test_float64_is_rounded_to_bfloat16_once():
    wire = HALVES[1]
    # By way of float32 these end half way, and then on the wrong side.
    above, below = 1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40
    assert packed(np.array([above, below, -above, -below]), wire).tolist() == [
        *(1 + 2.0**-7, 1 + 2.0**-7),
        *(-1 - 2.0**-7, -1 - 2.0**-7),
    ]


def test_a_product_of_a_double_is_rounded_to_bfloat16_once():
    numbers = rounding_borders(np.dtype("f8"), HALVES[1])
    # The same halves, made by the multiplication.
    got = packed(numbers * 4, HALVES[1], 0.25)
    finite = np.isfinite(numbers * 4)
    expected = nearest_bits(numbers[finite], HALVES[1])
    assert (bits_of(got)[finite] == expected).all()


def test_halves_are_multiplied_in_float32():
    # In float16 the factor would be 0.33325, and 3 times it 0.99975.
    assert packed(np.array([3.0], "f2"), np.dtype("f2"), 1 / 3).tolist() == [1.0]
    # The product underflows in float16, and its cast does not.
    tiny = packed(np.array([2.0**-24], "f2"), np.dtype("f4"), 2.0**-10)
    assert tiny.tolist() == [2.0**-34]


def test_a_double_on_either_side_is_multiplied_in_float64():
    third = 1 / 3
    wide = packed(np.array([1.0], "f4"), np.dtype("f8"), third)
    narrow = packed(np.array([1e300]), np.dtype("f4"), 1e-300)
    assert (wide[0], narrow[0]) == (third, np.float32(1e300 * 1e-300))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_without_a_scale_and_a_cast_bits_are_copied(dtype):
    bits = np.random.RandomState(1).bytes(dtype.itemsize * 10_000)
    array = np.frombuffer(bits, dtype)
    assert packed(array, dtype).tobytes() == bits


@pairs
def test_special_numbers_keep_their_meaning(source, wire):
    special = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0], source)
    for scale in (None, 0.5):
        got = packed(special, wire, scale).astype("f8")
        assert got[[0, 1]].tolist() == [np.inf, -np.inf]
        assert np.isnan(got[2])
        assert np.signbit(got[3])
        assert got[4] == 0
        assert not np.signbit(got[4])


@pairs
def test_no_number_warns_or_raises(source, wire):
    numbers = telling_numbers(source, np.random.RandomState(2))
    bucket = Bucket(wire)
    bucket.append(0, numbers.size)
    buffer = np.empty(numbers.size, wire)
    with np.errstate(all="raise"):
        for scale in (None, 1 / 3, 1e300):
            pack(bucket, [numbers], buffer, scale)
        unpack(bucket, [np.empty_like(numbers)], buffer)


@pairs
def test_nothing_as_large_as_the_array_is_held_on_the_way(source, wire):
    array = np.ones(1 << 20, source)
    bucket = Bucket(wire)
    bucket.append(0, array.size)
    buffer = np.empty(array.size, wire)
    tracemalloc.start()
    try:
        pack(bucket, [array], buffer, 0.5)
        pack(bucket, [array], buffer)
        unpack(bucket, [array], buffer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes // 2


@pairs
@pytest.mark.parametrize("scale", [None, 0.25])
def test_every_layout_is_packed_and_unpacked(source, wire, scale):
    values = np.arange(24).reshape(4, 6)
    array = np.zeros((6, 8), source).T[::2, :]
    array[...] = values
    scalar = np.array(7, source)
    empty = np.empty((0, 3), source)
    bucket = Bucket(wire)
    for index, n_elems in enumerate((24, 1, 0)):
        bucket.append(index, n_elems)
    buffer = np.full(30, np.nan, wire)
    pack(bucket, [array, scalar, empty], buffer, scale)
    factor = scale or 1
    assert buffer.tolist() == [x * factor for x in [*range(24), 7]] + [0] * 5
    array[...] = 0
    unpack(bucket, [array, scalar, empty], buffer)
    assert (array == values * factor).all()
    assert scalar == 7 * factor


def test_complex_numbers_are_scaled_as_pairs():
    array = np.array([complex(np.inf, 1), complex(-0.0, -2), 3 + 4j], "c8")
    got = packed(array, array.dtype, 0.5)
    assert got.view("f4").tolist() == [np.inf, 0.5, -0.0, -1, 1.5, 2]
    assert np.signbit(got[1].real)


def test_numbers_of_the_other_byte_order_are_scaled():
    array = np.array([1, 2, 3], ">f4")
    assert packed(array, np.dtype("f4"), 0.5).tolist() == [0.5, 1, 1.5]
    assert packed(array, np.dtype("f2")).tolist() == [1, 2, 3]


def test_what_has_no_half_is_scaled_in_its_own_way():
    seconds = np.array([4, -6], "m8[s]")
    assert packed(seconds, seconds.dtype, 0.5).astype("i8").tolist() == [2, -3]
    wide = np.array([1 + np.finfo("g").eps], "g")
    assert packed(wide, wide.dtype, 2.0)[0] == 2 * wide[0]


@pytest.mark.parametrize("dtype", ["?", "i4", "u1"])
def test_integers_have_no_scale(dtype):
    with pytest.raises(TypeError, match="cannot be scaled"):
        packed(np.ones(2, dtype), np.dtype(dtype), 0.5)


@pytest.mark.parametrize("dtype", ["f4", "?", "M8[s]", "V16", "U2"])
def test_what_is_missing_and_what_follows_are_zero_bytes(dtype):
    bucket = Bucket(np.dtype(dtype))
    bucket.append(0, 2)
    buffer = np.frombuffer(bytearray(b"\1" * 5 * bucket.dtype.itemsize), dtype)
    pack(bucket, [None], buffer)
    assert not any(buffer.tobytes())


def test_a_bucket_without_arrays_is_padding():
    buffer = np.ones(3, "f4")
    pack(Bucket(np.dtype("f4")), [], buffer)
    assert buffer.tolist() == [0, 0, 0]
    unpack(Bucket(np.dtype("f4")), [], buffer)


@pytest.mark.parametrize("scale", [None, 1 / 3])
@pytest.mark.parametrize("odd", ["none", "missing", "dtype", "piece", "layout"])
def test_small_neighbours_are_packed_as_if_each_were_alone(odd, scale):
    rng = np.random.default_rng(0)
    arrays: list = [rng.standard_normal((3, n + 1)).astype("f4") for n in range(9)]
    if odd == "missing":
        arrays[4] = None
    elif odd == "dtype":
        arrays[4] = arrays[4].astype("f8")
    elif odd == "layout":
        arrays[4] = np.asfortranarray(arrays[4])
    bucket = Bucket(np.dtype("f4"))
    start = 2 if odd == "piece" else 0
    for i, array in enumerate(arrays):
        bucket.append(i, 15 if array is None else array.size - start, start)
    buffer = np.empty(bucket.n_elems, "f4")
    pack(bucket, arrays, buffer, scale)
    for array, begin in zip(arrays, bucket.offsets, strict=True):
        if array is None:
            assert not buffer[begin : begin + 15].any()
        else:
            alone = packed(array, np.dtype("f4"), scale)[start:]
            assert (buffer[begin : begin + alone.size] == alone).all()
    assert len(bucket.runs) == 1
