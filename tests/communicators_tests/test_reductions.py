"""Reducing arrays: right values, kept dtypes, the same bits on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from communicators_tests.conftest import TOPOLOGIES, create_or_refuse
from helpers.ranks import assert_all_ranks

from communicators import create_communicator
from communicators.registry import available_communicators

parallel = pytest.mark.parallel([1, 2, 3, 4])
NUMPY_OPS = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
}


def expected_of(op: str, rows: np.ndarray) -> np.ndarray:
    """Return NumPy's own reduction over axis 0, halves in float32."""
    wide = rows.astype("f4") if rows.dtype == "f2" else rows
    result = NUMPY_OPS[op](wide, axis=0)
    if rows.dtype.kind in "iu" and op in ("sum", "prod"):
        return result.astype(rows.dtype)
    return result.astype(rows.dtype) if rows.dtype == "f2" else result


# Many cases share a communicator: making one for each would take most of the time.


@pytest.mark.reports("chainer/chainer#6670")
@parallel
@pytest.mark.parametrize("op", NUMPY_OPS)
def test_allreduce_is_numpys_reduction_over_ranks(comm, op):
    wrong = []
    for dtype in ("?", "i1", "u2", "i8", "f2", "f4", "f8", "c8"):
        rows = (np.arange(comm.size * 7) % 3).reshape(comm.size, 7).astype(dtype)
        got = comm.allreduce(rows[comm.rank].copy(), op)
        expected = expected_of(op, rows)
        if got.dtype != expected.dtype or not np.allclose(got, expected, rtol=1e-6):
            wrong.append(f"{dtype}: {got!r} instead of {expected!r}")
    assert_all_ranks(comm, not wrong, f"{wrong}")


@pytest.mark.reports("chainer/chainer#5474")
@parallel
def test_allreduce_keeps_shapes(comm):
    wrong = []
    for shape in [(), (0,), (3, 0), (1,), (2, 3), (1000,)]:
        got = comm.allreduce(np.full(shape, comm.rank + 1.0))
        total = comm.size * (comm.size + 1) / 2
        if got.shape != shape or not (got == total).all():
            wrong.append(f"{shape}: {got!r}")
    assert_all_ranks(comm, not wrong, f"{wrong}")


@pytest.mark.reports("horovod/horovod#411", "horovod/horovod#1390")
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("name", available_communicators())
def test_every_topology_gives_the_same_sum_on_all_ranks_bit_by_bit(name):
    size = create_communicator("naive").size
    refused = 0
    for topology in TOPOLOGIES[size]:
        try:
            comm = create_or_refuse(name, topology)
        except pytest.skip.Exception:
            refused += 1
            continue
        with comm:
            for n_elems in (1, 2, size - 1, size + 1, 64 * size + 5, 300_001):
                random = np.random.RandomState(comm.rank)
                mine = random.randn(n_elems).astype("f4")
                rows = [
                    np.random.RandomState(r).randn(n_elems).astype("f4")
                    for r in range(size)
                ]
                got = comm.allreduce(mine)
                exact = np.sum(rows, axis=0, dtype="f8")
                ok = np.allclose(got, exact, atol=1e-5)
                assert_all_ranks(comm, ok, f"{name} on {topology}, {n_elems}")
                bits = comm.mpi_comm.allgather(got.tobytes())
                assert_all_ranks(comm, len(set(bits)) == 1, "bits differ")
    assert refused < len(TOPOLOGIES[size])


@parallel
def test_integers_are_exact_in_any_grid(comm):
    big = np.array([2**53 + 1, -(2**40)], "i8") + comm.rank
    got = comm.allreduce(big)
    n = comm.size
    expected = [n * (2**53 + 1) + n * (n - 1) // 2, -n * 2**40 + n * (n - 1) // 2]
    assert_all_ranks(comm, got.tolist() == expected, f"{got}")


@parallel
def test_half_precision_is_reduced_in_float32(comm):
    got = comm.allreduce(np.full(5, 40000, "f2"), "mean")
    assert_all_ranks(comm, got.dtype == "f2" and (got == 40000).all(), f"{got}")


@parallel
def test_nan_wins_in_max_and_min(comm):
    mine = np.array([np.nan if comm.rank == comm.size - 1 else 1.0])
    ok = np.isnan(comm.allreduce(mine, "max")) and np.isnan(comm.allreduce(mine, "min"))
    assert_all_ranks(comm, bool(ok))


@parallel
@pytest.mark.parametrize("layout", ["fortran", "strided", "big-endian"])
def test_allreduce_of_any_layout_leaves_the_input_alone(comm, layout):
    array = np.arange(12.0).reshape(3, 4) * (comm.rank + 1)
    array = {
        "fortran": np.asfortranarray(array),
        "strided": np.repeat(array, 2, axis=0)[::2],
        "big-endian": array.astype(">f8"),
    }[layout]
    before = array.copy()
    got = comm.allreduce(array)
    factor = comm.size * (comm.size + 1) / 2
    ok = np.array_equal(got, np.arange(12.0).reshape(3, 4) * factor)
    assert_all_ranks(comm, ok and got.dtype == array.dtype, f"{got}")
    assert_all_ranks(comm, np.array_equal(array, before), "input changed")


@parallel
def test_tuples_are_reduced_each_for_itself(comm):
    got = comm.allreduce((np.ones(2, "f4"), np.array(True)), "sum")
    ok = isinstance(got, tuple) and got[0][0] == comm.size and got[1] == comm.size
    assert_all_ranks(comm, ok and got[0].dtype == "f4", f"{got}")


@parallel
@pytest.mark.parametrize("op", NUMPY_OPS)
def test_reduce_scatter_keeps_the_ranks_block(comm, op):
    n = comm.size
    wrong = []
    for block in [(), (0,), (3,), (2, 2)]:
        data = np.arange(n * max(1, int(np.prod(block))), dtype="f8")
        data = data[: n * int(np.prod(block))].reshape((n, *block)) + comm.rank
        rows = np.stack([data - comm.rank + r for r in range(n)])
        got = comm.reduce_scatter(data, op)
        expected = NUMPY_OPS[op](rows, axis=0)[comm.rank]
        if got.shape != block or not np.allclose(got, expected):
            wrong.append(f"{block}: {got!r} instead of {expected!r}")
    assert_all_ranks(comm, not wrong, f"{wrong}")


@pytest.mark.parallel([3])
@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 3), ("mean", 1), ("max", 2), ("min", 0), ("prod", 0)]
)
def test_object_reductions(flat, op, expected):
    assert_all_ranks(flat, flat.allreduce_obj(flat.rank, op) == expected)
    got = flat.allreduce_obj(np.full(2, float(flat.rank)), op)
    assert_all_ranks(flat, (got == expected).all(), f"{got}")
