"""The pack and unpack kernels on a GPU.

``kernels.py KERNELS check [CASES]`` or ``kernels.py KERNELS measure [REPETITIONS
ARRAYS]``. KERNELS is ``cuda``, or a library of the kernels for the host (see
helpers.gpu).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from helpers.gpu import load_cupy
from host_kernels.cases import COMPLEX, FLOATS, RAW, Case, random_bits, random_case
from host_kernels.floats import telling_numbers

from communicators.buckets import Bucket
from communicators.devices.flat_buffer_kernels import TILE
from gpu_tests.device_memory import DeviceMemory
from gpu_tests.measure_kernels import measure
from gpu_tests.results import tell_detail

SCALES = (None, 1 / 3, 1e-3, 3.0)
ODD_SIZES = (1, 7, 0, TILE - 1, 5_000, 40_001)

#: Elements beyond the reach of 32 bits, and the bytes that looking at them takes.
MANY = 2**31 + 5_000
BYTES_FOR_MANY = 6 * MANY


def cases(n_random: int) -> Iterator[Case]:
    """Return what is compared with the twin for NumPy arrays, byte for byte."""
    for wire in FLOATS:
        for dtype in FLOATS:
            numbers = telling_numbers(dtype, np.random.RandomState(3))
            parts = [numbers, numbers[: TILE // 2 - 1], numbers[-2 * TILE :]]
            yield from (Case(wire, parts, scale=scale) for scale in SCALES)
            # Wherever array and buffer begin.
            array = numbers[: 3 * TILE + 11]
            for shift in range(9):
                for at in (0, 1, 2, 4, 8):
                    yield Case(wire, [array], shifts=[shift], buffer_shift=at)
    random = np.random.RandomState(4)
    sizes = (0, 1, 3 * TILE, 0, 5, TILE + 1, 0)
    for dtype in (*RAW, *COMPLEX, *FLOATS):
        yield Case(dtype, [random_bits(random, n, dtype) for n in sizes], n_padding=7)
    for dtype in COMPLEX:
        yield Case(dtype, [random_bits(random, 3 * TILE, dtype)], scale=0.3)
    tiny = [
        random.standard_normal(n).astype(FLOATS[n % 4])
        for n in random.randint(0, 20, 5_000)
    ]
    present = (random.rand(len(tiny)) < 0.9).tolist()
    yield Case(np.dtype("f4"), tiny, present=present, scale=0.2)
    yield from (random_case(np.random.RandomState(seed)) for seed in range(n_random))


def check_against_float64(cp: Any, device: Any) -> int:
    """Pack and unpack as the engine does; compare with float64 on the host.

    Returns:
        int: number of combinations of dtypes and scales.
    """
    random = np.random.RandomState(5)
    n_checked = 0
    for wire in FLOATS:
        for dtype in ("f2", "f4", "f8"):
            for scale in SCALES:
                host = [random.standard_normal(n).astype(dtype) for n in ODD_SIZES]
                bucket = Bucket(wire)
                for index, array in enumerate(host):
                    bucket.append(index, array.size)
                arrays = [cp.asarray(array) for array in host]
                buffer = device.take(bucket.n_elems, wire, 2)
                device.pack(bucket, arrays, buffer, scale)
                exact = np.concatenate(host).astype("f8") * (scale or 1)
                # One rounding to float32 of factor and product, and one to the wire.
                bound = 2.0**-22 * np.abs(exact) + _half_a_step(exact, wire)
                packed = device.view(buffer.view("u1")).get().view(wire)
                got = packed[: bucket.n_elems].astype("f8")
                _expect(np.abs(got - exact) <= bound, wire, dtype, scale, "pack")
                _expect(packed[bucket.n_elems :] == 0, wire, dtype, scale, "padding")
                targets = [cp.zeros(array.shape, dtype) for array in host]
                device.unpack(bucket, targets, buffer)
                flat = np.concatenate([target.get() for target in targets])
                bound = _half_a_step(got, np.dtype(dtype))
                error = np.abs(flat.astype("f8") - got)
                _expect(error <= bound, wire, dtype, scale, "unpack")
                device.give_back(buffer)
                n_checked += 1
    return n_checked


def check_beyond_32_bits(cp: Any, device: Any) -> str:
    """Pack and unpack an array with more than 2^31 elements, where it fits."""
    free, _total = cp.cuda.Device().mem_info
    if free < BYTES_FOR_MANY:
        return f"not beyond 2^31 elements ({free / 1e9:.0f} GB free)"
    bucket = Bucket(np.dtype("u1"))
    bucket.append(0, 3)
    bucket.append(1, MANY)
    small = cp.asarray(np.array([7, 8, 9], "u1"))
    large = cp.arange(MANY // 8 + 1, dtype="u8").view("u1")[:MANY]
    buffer = device.take(bucket.n_elems, bucket.dtype, 1)
    device.pack(bucket, [small, large], buffer)
    packed = device.view(buffer)
    _expect(packed[:3].get() == [7, 8, 9], "pack")
    _expect(bool((packed[3 : 3 + MANY] == large).all()), "pack beyond 2^31")
    targets = [cp.zeros_like(small), cp.zeros_like(large)]
    device.unpack(bucket, targets, buffer)
    _expect(bool((targets[1] == large).all()), "unpack beyond 2^31")
    return "up to 2^31 + 5000 elements"


def _half_a_step(numbers: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return half the distance of neighbours in ``dtype``, at numbers it can hold."""
    info = ml_dtypes.finfo(dtype)
    smallest = float(info.smallest_subnormal)
    return np.maximum(float(info.eps) * np.abs(numbers), smallest) / 2


def _expect(condition: Any, *what: object) -> None:
    if not np.all(condition):
        raise AssertionError(what)


def check(cp: Any, device: Any, n_random: int) -> None:
    """Run all checks; tell how many there were."""
    memory = DeviceMemory(cp)
    n_cases = 0
    for case in cases(n_random):
        case.check(device.kernels, memory)
        n_cases += 1
    n_float64 = check_against_float64(cp, device)
    beyond = check_beyond_32_bits(cp, device)
    tell_detail(
        f"{n_cases} cases bit for bit as NumPy's twin, {n_float64} against float64, "
        f"{beyond}"
    )


def main() -> None:
    """Do what the command line says."""
    kernels, what, *numbers = sys.argv[1:]
    cp = load_cupy(kernels)
    # Importing it imports CuPy.
    from communicators.devices.cuda import CudaDevice

    device = CudaDevice(cp.cuda.runtime.getDevice())
    if what == "check":
        check(cp, device, *map(int, numbers or [200]))
    else:
        measure(cp, device, *map(int, numbers or [20, 161]))


if __name__ == "__main__":
    main()
