"""How fast the pack and unpack kernels are, beside a plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from communicators.buckets import DEFAULT_BUCKET_BYTES, Bucket, plan_buckets
from communicators.devices.flat_buffer_kernels import pointer_table, present_bytes
from communicators.gradient_sets import shapes_of
from gpu_tests.results import tell_detail, tell_row

FLOAT32 = np.dtype(np.float32)
#: dtypes on the wire, with the factor that gradients of 8 ranks are scaled by.
WIRES = (
    (FLOAT32, None),
    (FLOAT32, 0.125),
    (np.dtype(np.float16), 0.125),
    (np.dtype(ml_dtypes.bfloat16), 0.125),
)
N_WARM_UP = 3
#: Copies that keep the device at work while the host enqueues what is timed.
N_COPIES_BEFORE = 40


class Stopwatch:
    """Times work on the current stream by events.

    Args:
        cp: CuPy.
        keep_busy: enqueues work that takes longer than enqueuing what is timed, so that
            the host's part is not timed.
        n_repetitions: of which the median is taken.
    """

    def __init__(
        self, cp: Any, keep_busy: Callable[[], None], n_repetitions: int
    ) -> None:
        self._cp = cp
        self._keep_busy = keep_busy
        self._n_repetitions = n_repetitions

    def median_ms(self, call: Callable[[], None]) -> float:
        """Return how long the device works on what ``call`` enqueues."""
        for _ in range(N_WARM_UP):
            call()
        times = []
        for _ in range(self._n_repetitions):
            start, end = self._cp.cuda.Event(), self._cp.cuda.Event()
            self._keep_busy()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(self._cp.cuda.get_elapsed_time(start, end))
        return statistics.median(times)


class Packed:
    """The gradients' buckets, with tables and buffers on the device.

    Args:
        cp: CuPy.
        device: the engine's.
        arrays: on the device.
        wire: dtype of the buffers.
        bucket_bytes: as the communicators' option.
    """

    def __init__(
        self,
        cp: Any,
        device: Any,
        arrays: Sequence[Any],
        wire: np.dtype[Any],
        bucket_bytes: int,
    ) -> None:
        sizes = [(i, array.size, wire) for i, array in enumerate(arrays)]
        self.buckets = plan_buckets(sizes, bucket_bytes)
        self._kernels = device.kernels
        self._parts = [
            _Part(cp, device, bucket, [arrays[i] for i in bucket.indices])
            for bucket in self.buckets
        ]

    def pack(self, scale: float | None) -> None:
        """Enqueue one launch a bucket."""
        for part in self._parts:
            self._kernels.pack(*part.args, scale, array_bytes=part.array_bytes)

    def unpack(self) -> None:
        """Enqueue one launch a bucket."""
        for part in self._parts:
            self._kernels.unpack(*part.args, array_bytes=part.array_bytes)

    def contents(self) -> np.ndarray:
        """Return all buffers behind each other, on the host."""
        return np.concatenate([part.contents() for part in self._parts])


class _Part:
    def __init__(
        self, cp: Any, device: Any, bucket: Bucket, arrays: Sequence[Any]
    ) -> None:
        host_table = pointer_table(bucket, [(a.data.ptr, a.dtype) for a in arrays])
        self._table = cp.asarray(host_table)
        self._bucket = bucket
        self._memory = cp.empty(bucket.nbytes, np.uint8)
        self.args = (
            self._table.data.ptr,
            len(arrays),
            self._memory.data.ptr,
            bucket.n_elems,
            bucket.dtype,
        )
        self.array_bytes = present_bytes(host_table, bucket.dtype)

    def contents(self) -> np.ndarray:
        return self._memory.get().view(self._bucket.dtype)


def measure(cp: Any, device: Any, n_repetitions: int, n_arrays: int) -> None:
    """Time copies and kernels; tell a row of each.

    Args:
        cp: CuPy.
        device: the engine's.
        n_repetitions: of which the median is taken.
        n_arrays: so many of ResNet-50's gradients, the first ones.
    """
    shapes = shapes_of("resnet50")[:n_arrays]
    sizes = [int(np.prod(shape)) for shape in shapes]
    n_elems = sum(sizes)
    host = np.random.RandomState(0).standard_normal(n_elems).astype(FLOAT32)
    source, target = cp.asarray(host), cp.empty(n_elems, FLOAT32)
    borders = np.cumsum([0, *sizes])
    arrays = [
        # Each with memory of its own, as gradients have.
        source[start:stop].copy().reshape(shape)
        for start, stop, shape in zip(borders[:-1], borders[1:], shapes, strict=True)
    ]

    def copy(into: int, out_of: Any) -> None:
        runtime = cp.cuda.runtime
        stream = cp.cuda.get_current_stream().ptr
        kind = runtime.memcpyDefault
        runtime.memcpyAsync(into, out_of.data.ptr, out_of.nbytes, kind, stream)

    def copy_whole() -> None:
        copy(target.data.ptr, source)

    def copy_each() -> None:
        for array, start in zip(arrays, borders[:-1], strict=True):
            copy(target.data.ptr + int(start) * FLOAT32.itemsize, array)

    def keep_busy() -> None:
        for _ in range(N_COPIES_BEFORE):
            copy_whole()

    stopwatch = Stopwatch(cp, keep_busy, n_repetitions)
    copy_bytes = 2 * host.nbytes
    copy_ms = stopwatch.median_ms(copy_whole)
    copy_gb_s = copy_bytes / copy_ms / 1e6

    def tell(what: str, n_launches: int, ms: float, n_bytes: int) -> float:
        gb_s = n_bytes / ms / 1e6
        cells = (n_launches, f"{ms:.4f}", f"{gb_s:.0f}", f"{gb_s / copy_gb_s:.2f}")
        tell_row("bandwidth", what, *cells)
        return gb_s / copy_gb_s

    tell("copy of one array", 1, copy_ms, copy_bytes)
    each_ms = stopwatch.median_ms(copy_each)
    tell("copies, one an array", len(arrays), each_ms, copy_bytes)
    ratios = {}
    for bucket_bytes, size in ((2**62, ""), (DEFAULT_BUCKET_BYTES, ", 4 MiB buckets")):
        for wire, scale in WIRES:
            packed = Packed(cp, device, arrays, wire, bucket_bytes)
            n_launches = len(packed.buckets)
            before = device.kernels.n_bytes
            packed.pack(scale)
            n_bytes = device.kernels.n_bytes - before
            ms = stopwatch.median_ms(lambda p=packed, s=scale: p.pack(s))
            scaled = "" if scale is None else ", scaled"
            what = f"pack as {wire.name}{scaled}{size}"
            ratios[what] = tell(what, n_launches, ms, n_bytes)
            _check(packed.contents(), host, scale)
            if scale is not None:
                ms = stopwatch.median_ms(packed.unpack)
                tell(f"unpack from {wire.name}{size}", n_launches, ms, n_bytes)
                # What it has written there goes into the next packing.
                _restore(cp, arrays, host, borders)
    ratio = ratios["pack as float32"]
    tell_detail(f"copy {copy_gb_s:.0f} GB/s, pack {ratio:.2f} of it")


def _check(got: np.ndarray, host: np.ndarray, scale: float | None) -> None:
    expected = host if scale is None else host * np.float32(scale)
    if not np.array_equal(got, expected.astype(got.dtype)):
        raise AssertionError("what was timed has packed other numbers")


def _restore(
    cp: Any, arrays: Sequence[Any], host: np.ndarray, borders: np.ndarray
) -> None:
    for array, start, stop in zip(arrays, borders[:-1], borders[1:], strict=True):
        array[...] = cp.asarray(host[start:stop].reshape(array.shape))
