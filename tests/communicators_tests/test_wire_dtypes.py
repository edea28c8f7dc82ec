"""Gradients of every floating dtype, averaged in every wire dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers.ranks import assert_all_ranks

from communicators import create_communicator
from communicators.buckets import DEFAULT_BUCKET_BYTES
from communicators.registry import available_communicators

parallel = pytest.mark.parallel([1, 2, 3, 4])
FLOATS = [np.dtype(t) for t in ("f2", ml_dtypes.bfloat16, "f4", "f8")]
WIRES = [None, "float16", "bfloat16", "float32", "float64"]
AVERAGING = [name for name in available_communicators() if name != "dummy"]
wires = pytest.mark.parametrize("wire", WIRES)


def wire_of(array: np.ndarray, wire: str | None) -> np.dtype:
    """Return what an array travels in."""
    if wire == "bfloat16":
        return FLOATS[1]
    if wire is None:
        return np.dtype(array.dtype if array.itemsize > 2 else "f4")
    return np.dtype(wire)


def tolerance(array: np.ndarray, wire: str | None, size: int) -> float:
    """Return the error of a mean relative to the largest number that enters it.

    Each rank's numbers are rounded once, each addition rounds again, and so does the
    cast to the dtype of the array.
    """
    travelling = ml_dtypes.finfo(wire_of(array, wire)).eps
    return float(size * travelling + ml_dtypes.finfo(array.dtype).eps)


def gradients(rank: int) -> list[np.ndarray]:
    """Return arrays of all dtypes, in turn, so that buckets mix them."""
    random = np.random.RandomState(rank)
    return [
        random.standard_normal(n_elems).astype(dtype)
        for n_elems in (1, 1000, 3)
        for dtype in FLOATS
    ]


@parallel
@wires
@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("bucket_bytes", [100, DEFAULT_BUCKET_BYTES])
def test_the_mean_is_right_to_the_precision_of_the_wire(name, wire, bucket_bytes):
    options = {} if name == "naive" else {"bucket_bytes": bucket_bytes}
    with create_communicator(
        name, allreduce_grad_dtype=wire, timeout_s=60, **options
    ) as comm:
        arrays = gradients(comm.rank)
        dtypes = [array.dtype for array in arrays]
        comm.allreduce_arrays(arrays)
        all_ranks = [gradients(rank) for rank in range(comm.size)]
        rows = [np.array(row, "f8") for row in zip(*all_ranks, strict=True)]
        wrong = [
            f"{array.dtype}: {array} instead of {row.mean(0)}"
            for array, row in zip(arrays, rows, strict=True)
            if not np.allclose(
                array.astype("f8"),
                row.mean(0),
                rtol=0,
                atol=tolerance(array, wire, comm.size) * np.abs(row).max(),
            )
        ]
        assert_all_ranks(comm, not wrong, "\n".join(wrong))
        assert_all_ranks(comm, [a.dtype for a in arrays] == dtypes, f"{dtypes}")
        bits = comm.mpi_comm.allgather([array.tobytes() for array in arrays])
        assert all(row == bits[0] for row in bits), "ranks differ"


@parallel
@wires
def test_the_mean_of_equal_large_numbers_is_that_number(wire):
    # Their sum overflows float16, and those of float32 and bfloat16 float32.
    with create_communicator("flat", allreduce_grad_dtype=wire) as comm:
        for dtype in FLOATS:
            large = 60000 if dtype == "f2" or wire == "float16" else 3e38
            array = np.full(5, large, dtype)
            comm.allreduce_arrays([array])
            got = array.astype("f8")
            atol = tolerance(array, wire, comm.size) * large
            ok = np.isfinite(got).all() and np.allclose(got, large, rtol=0, atol=atol)
            assert_all_ranks(comm, ok, f"{dtype}: {array}")


@parallel
@wires
def test_infinite_gradients_neither_warn_nor_raise(wire):
    with create_communicator("flat", allreduce_grad_dtype=wire, timeout_s=60) as comm:
        for dtype in FLOATS:
            sign = -1 if comm.rank == 1 else 1
            largest = float(ml_dtypes.finfo(dtype).max)
            array = np.array([sign * np.inf, np.nan, largest, 1.0], dtype)
            with np.errstate(all="raise"):
                comm.allreduce_arrays([array])
            # inf - inf
            expected = np.inf if comm.size == 1 else np.nan
            got = array.astype("f8")
            ok = np.array_equal(got[:2], [expected, np.nan], equal_nan=True)
            ok = ok and abs(got[3] - 1) < 0.02 and not np.isnan(got[2])
            assert_all_ranks(comm, ok, f"{dtype}: {array}")


@parallel
@pytest.mark.parametrize("wire", WIRES[1:])
def test_what_is_no_real_number_travels_as_it_is(wire):
    with create_communicator("flat", allreduce_grad_dtype=wire) as comm:
        numbers = np.array([1 + 2.0**-20, 1j]) * (comm.rank + 1)
        integers = np.array([2**30 + 1, comm.rank])
        comm.allreduce_arrays([numbers, integers], op="sum")
        ranks = np.arange(comm.size)
        ok = np.array_equal(numbers, np.array([1 + 2.0**-20, 1j]) * sum(ranks + 1))
        ok = ok and integers.tolist() == [(2**30 + 1) * comm.size, sum(ranks)]
        assert_all_ranks(comm, ok, f"{numbers}, {integers}")
