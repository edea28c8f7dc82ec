"""The kernels that pack and unpack on a device, run on the host.

Their source is compiled as C++; :mod:`host_kernels.cases` compares every byte with
what the twin for NumPy arrays does.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from host_kernels.cases import COMPLEX, FLOATS, RAW, Case, random_bits, random_case
from host_kernels.floats import telling_numbers
from host_kernels.library import HostLauncher, build, why_no_library
from host_kernels.memory import HostMemory

from communicators.buckets import Bucket
from communicators.devices.flat_buffer_kernels import (
    BLOCKS_PER_MULTIPROCESSOR,
    KERNEL_NAMES,
    THREADS,
    TILE,
    FlatBufferKernels,
    pointer_table,
    present_bytes,
    source,
)

TESTS = pathlib.Path(__file__).resolve().parents[1]
F2, F4 = np.dtype("f2"), np.dtype("f4")
pairs = pytest.mark.parametrize(
    ("source", "wire"),
    [(s, w) for s in FLOATS for w in FLOATS],
    ids=lambda dtype: dtype.name,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if reason := why_no_library():
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("flat_buffer"))


@pytest.fixture
def launcher(library):
    return HostLauncher(library)


@pytest.fixture
def kernels(launcher):
    """As on a device with one multiprocessor, so that blocks take several tiles."""
    return FlatBufferKernels(launcher, 1)


@pairs
@pytest.mark.parametrize("scale", [None, 1 / 3, 1e-3, 3.0])
def test_every_number_is_cast_and_scaled_as_the_twin_does(kernels, source, wire, scale):
    numbers = telling_numbers(source, np.random.RandomState(3))
    # Whole tiles, and single elements at the borders of arrays.
    parts = [numbers, numbers[: TILE // 2 - 1], numbers[-2 * TILE :]]
    Case(wire, parts, scale=scale).check(kernels, HostMemory())


@pytest.mark.parametrize("seeds", [range(i, i + 100) for i in range(0, 300, 100)])
def test_random_cases(kernels, seeds):
    for seed in seeds:
        random_case(np.random.RandomState(seed)).check(kernels, HostMemory())


@pytest.mark.parametrize("dtype", [*RAW, *COMPLEX, *FLOATS], ids=str)
def test_every_dtype_is_copied_bit_for_bit(kernels, dtype):
    random = np.random.RandomState(4)
    sizes = [0, 1, 3 * TILE, 0, 5, TILE + 1, 0]
    arrays = [random_bits(random, n_elems, dtype) for n_elems in sizes]
    Case(dtype, arrays, n_padding=7).check(kernels, HostMemory())


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_are_scaled_as_pairs(kernels, dtype):
    numbers = random_bits(np.random.RandomState(5), 3 * TILE, dtype)
    Case(dtype, [numbers, numbers[:5]], scale=0.3).check(kernels, HostMemory())


@pairs
def test_misaligned_arrays(kernels, source, wire):
    random = np.random.RandomState(6)
    array = random.standard_normal(3 * TILE + 11).astype(source)
    for shift in range(9):
        for buffer_shift in (0, 1, 2, 4, 8):
            case = Case(wire, [array], shifts=[shift], buffer_shift=buffer_shift)
            case.check(kernels, HostMemory())
            case.scale = 0.5
            case.check(kernels, HostMemory())


@pytest.mark.parametrize("n_before", [1, 2, 3, TILE - 1, TILE, TILE + 1])
def test_an_odd_array_in_front_shifts_those_behind(kernels, n_before):
    random = np.random.RandomState(7)
    arrays = [random.standard_normal(n).astype("f4") for n in (n_before, 5 * TILE)]
    Case(F4, arrays).check(kernels, HostMemory())
    Case(F2, arrays, scale=0.25).check(kernels, HostMemory())


def test_thousands_of_tiny_arrays_are_one_launch(kernels, launcher):
    random = np.random.RandomState(8)
    arrays = [
        random.standard_normal(n).astype(FLOATS[n % 4])
        for n in random.randint(0, 20, 2000)
    ]
    present = (random.rand(2000) < 0.9).tolist()
    Case(F4, arrays, present=present, scale=0.2).check(kernels, HostMemory())
    n_tiles = -(-sum(array.size for array in arrays) // TILE)
    assert launcher.launches == [
        ("pack_scaled_float32", n_tiles, THREADS),
        ("unpack_float32", n_tiles, THREADS),
    ]


@pytest.mark.parametrize("n_multiprocessors", [1, 2, 100])
def test_blocks_are_bounded_and_take_all_tiles(launcher, n_multiprocessors):
    n_tiles = 3 * BLOCKS_PER_MULTIPROCESSOR + 1
    arrays = [np.arange(n, dtype="f4") for n in (3, (n_tiles - 1) * TILE, 1, 2)]
    kernels = FlatBufferKernels(launcher, n_multiprocessors)
    Case(F4, arrays, scale=0.2).check(kernels, HostMemory())
    n_blocks = min(n_tiles, n_multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
    assert [shape for _, *shape in launcher.launches] == [[n_blocks, THREADS]] * 2


@pytest.mark.parametrize("n_padding", [0, 1, TILE, 5 * TILE])
@pytest.mark.parametrize("n_absent", [1, TILE, 5 * TILE])
def test_absent_arrays_and_padding_are_zeros(kernels, n_padding, n_absent):
    arrays = [np.ones(n, "f4") for n in (5, n_absent, 2 * TILE, n_absent)]
    present = [True, False, True, False]
    case = Case(F4, arrays, present=present, n_padding=n_padding, buffer_shift=1)
    case.check(kernels, HostMemory())


def test_an_empty_buffer_is_no_launch(kernels, launcher):
    Case(F4, []).check(kernels, HostMemory())
    Case(F4, [np.empty(0, "f4")]).check(kernels, HostMemory())
    assert launcher.launches == []


@pytest.mark.parametrize("begin", [2**31, 2**33])
@pytest.mark.parametrize("dtype", [F2, F4, np.dtype("i8")], ids=str)
def test_offsets_beyond_32_bits(launcher, begin, dtype):
    # Only the end of the buffer is there; its first element is at a pretended address.
    # An absent array fills what is before, and 5 elements of what is there.
    arrays = [np.arange(n, dtype=dtype) for n in (3, 2 * TILE, 100)]
    bucket = Bucket(dtype)
    bucket.append(0, begin + 5)
    for index, array in enumerate(arrays, 1):
        bucket.append(index, array.size)
    entries = [(array.ctypes.data, array.dtype) for array in arrays]
    table = pointer_table(bucket, [None, *entries])
    buffer = np.ones(bucket.n_elems - begin, dtype)
    pretended = buffer.ctypes.data - begin * dtype.itemsize
    n_tiles = -(-bucket.n_elems // TILE)
    kernels = FlatBufferKernels(launcher, n_tiles)
    args = (table.ctypes.data, len(table), pretended, bucket.n_elems, dtype)
    # A block for each tile, and only those at the end run.
    first = begin // TILE
    launcher.only_blocks = (first, n_tiles - first)
    n_bytes = present_bytes(table, dtype)
    kernels.pack(*args, array_bytes=n_bytes)
    assert buffer.tolist() == [0] * 5 + [x for array in arrays for x in array]
    expected = [array + 1 for array in arrays]
    buffer += 1
    kernels.unpack(*args, array_bytes=n_bytes)
    assert all(map(np.array_equal, arrays, expected))
    assert [n_blocks for _, n_blocks, _ in launcher.launches] == [n_tiles] * 2


def test_a_double_overflows_a_scale_for_floats_to_infinity(kernels):
    Case(F4, [np.ones(5, "f4")], scale=1e300).check(kernels, HostMemory())


def test_bytes_are_those_of_the_arrays_that_are_there_and_of_the_buffer(launcher):
    kernels = FlatBufferKernels(launcher, 1)
    arrays = [np.ones(3, "f8"), np.ones(4, "f4"), np.ones(5, "f2")]
    bucket = Bucket(F2)
    for index, array in enumerate(arrays):
        bucket.append(index, array.size)
    entries = [(array.ctypes.data, array.dtype) for array in arrays]
    table = pointer_table(bucket, [entries[0], None, entries[2]])
    assert present_bytes(table, F2) == 3 * 8 + 5 * 2
    buffer = np.empty(20, "f2")
    args = (table.ctypes.data, len(table), buffer.ctypes.data, buffer.size, F2)
    kernels.pack(*args, array_bytes=34)
    assert (kernels.n_launches, kernels.n_bytes) == (1, 34 + 40)
    kernels.unpack(*args, array_bytes=34)
    assert (kernels.n_launches, kernels.n_bytes) == (2, 2 * (34 + 40))


def test_a_table_has_a_row_for_each_array():
    bucket = Bucket(F4)
    for index, n_elems in zip([3, 0, 7], [4, 0, 6], strict=True):
        bucket.append(index, n_elems)
    table = pointer_table(bucket, [(64, F2), None, (128, np.dtype("f8"))])
    assert table.dtype == np.int64
    assert table.flags.c_contiguous
    assert table.tolist() == [[64, 4, 0, 1], [0, 0, 4, 3], [128, 6, 4, 4]]


@pytest.mark.parametrize("dtype", ["c8", "c16", "V16"])
def test_a_table_counts_pairs_twice(dtype):
    bucket = Bucket(np.dtype(dtype))
    bucket.append(0, 4)
    bucket.append(1, 6)
    table = pointer_table(bucket, [(64, bucket.dtype), None])
    assert table[:, 1:3].tolist() == [[8, 0], [12, 8]]
    assert present_bytes(table, bucket.dtype) == 4 * bucket.dtype.itemsize


@pytest.mark.parametrize(
    ("wire", "dtype"),
    [
        ("f4", "i4"),
        ("i4", "f4"),
        ("i4", "u4"),
        ("c8", "f4"),
        ("f4", "c8"),
        ("f4", ">f4"),
        (">f4", ">f4"),
        ("S3", "S3"),
        ("O", "O"),
    ],
)
def test_a_table_refuses_what_the_kernels_do_not_cast(wire, dtype):
    bucket = Bucket(np.dtype(wire))
    bucket.append(0, 4)
    with pytest.raises(TypeError, match="on a device"):
        pointer_table(bucket, [(64, np.dtype(dtype))])


def test_a_table_refuses_odd_addresses_and_other_numbers_of_arrays():
    bucket = Bucket(F2)
    bucket.append(5, 4)
    with pytest.raises(ValueError, match=r"array 5 is at address 0x42, .* item size"):
        pointer_table(bucket, [(0x42, F4)])
    with pytest.raises(ValueError, match="2 arrays for a bucket of 1"):
        pointer_table(bucket, [None, None])


@pytest.mark.parametrize("dtype", ["i4", "?", "M8[s]"])
def test_only_floating_numbers_are_scaled(dtype):
    kernels = FlatBufferKernels(_NeverLaunches(), 1)
    with pytest.raises(TypeError, match="cannot be scaled"):
        kernels.pack(64, 1, 64, 4, np.dtype(dtype), 0.5, array_bytes=0)


class _NeverLaunches:
    def launch(self, *args: object) -> None:
        raise AssertionError(args)


def test_the_source_has_the_kernels_and_numbers_of_the_launch(library):
    functions = ctypes.CDLL(str(library))
    assert all(hasattr(functions, name) for name in KERNEL_NAMES)
    text = source()
    assert f"kThreads = {THREADS};" in text
    assert f"kTile = {TILE};" in text
    assert "#include" not in text


@pytest.fixture(scope="module")
def sanitized_library(tmp_path_factory):
    if reason := why_no_library():
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("sanitized"), sanitized=True)


def test_no_access_is_out_of_bounds_or_misaligned(sanitized_library):
    done = run_sanitized(sanitized_library, 150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("150 cases, 2")


def test_the_sanitizer_sees_one_element_too_many(sanitized_library):
    done = run_sanitized(sanitized_library, 0, "--faulty")
    assert done.returncode != 0
    assert "use-after-poison" in done.stderr


def run_sanitized(
    library: pathlib.Path, n_cases: int, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run random cases in a process that has AddressSanitizer."""
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    program = [sys.executable, "-m", "host_kernels.sanitized"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.run(
        [*program, str(library), str(n_cases), *flags],
        # Python itself leaves memory to the end of the process.
        env={
            **os.environ,
            "PYTHONPATH": path,
            "LD_PRELOAD": found.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
