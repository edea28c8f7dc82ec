"""Every operation of NCCL through each binding, against NumPy.

They need the emulated NCCL: LD_LIBRARY_PATH holds its folder before Python starts.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from helpers import nccl
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from communicators.nccl_bindings import NcclCommunicator
from communicators.nccl_bindings.interface import NCCL_TYPES, UNIQUE_ID_BYTES

nccl.need_any_package()

WORLD = MPI.COMM_WORLD
RANKS = types.SimpleNamespace(mpi_comm=WORLD)

# More than one piece of the emulator's staging memory, and an odd number.
SIZES = [0, 1, 7, 300_001]

REDUCTIONS = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "prod": lambda rows: rows.prod(axis=0, dtype=rows.dtype),
    "max": lambda rows: rows.max(axis=0),
    "min": lambda rows: rows.min(axis=0),
    "avg": lambda rows: (rows.sum(axis=0, dtype=rows.dtype) / len(rows)).astype(
        rows.dtype
    ),
}

every_dtype = pytest.mark.parametrize("dtype", list(NCCL_TYPES))
in_place_or_not = pytest.mark.parametrize("in_place", [False, True])


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def rows_of_all_ranks(n_elems: int, dtype: str) -> np.ndarray[Any, Any]:
    """Return what each rank holds, shape (size, n_elems).

    Small integers whose sums, products and means are exact in every dtype.
    """
    random = np.random.default_rng(n_elems)
    low = 1 if dtype.startswith("uint") else -2
    rows = random.integers(low, 4, size=(WORLD.size, n_elems))
    # The last one makes the mean whole.
    rows[-1] -= rows.sum(axis=0) % WORLD.size
    rows[-1] += WORLD.size if low == 1 else 0
    return rows.astype(numpy_dtype(dtype))


def pointer(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


def assert_equal(what: object, got: Any, expected: Any) -> None:
    same = got.dtype == expected.dtype and np.array_equal(got, expected)
    assert_all_ranks(RANKS, same, f"{what}: got {got}, expected {expected}")


@pytest.mark.parallel([1, 2, 3])
@every_dtype
@in_place_or_not
@pytest.mark.reports("chainer/chainermn#187")
def test_all_reduce(comm: NcclCommunicator, dtype: str, in_place: bool):
    for n_elems in SIZES:
        rows = rows_of_all_ranks(n_elems, dtype)
        for op, reduction in REDUCTIONS.items():
            send = rows[comm.rank].copy()
            recv = send if in_place else np.zeros_like(send)
            comm.all_reduce(pointer(send), pointer(recv), n_elems, dtype, op, 0)
            assert_equal((op, n_elems), recv, reduction(rows))


@pytest.mark.parallel([1, 2, 3])
@every_dtype
@in_place_or_not
def test_reduce(comm: NcclCommunicator, dtype: str, in_place: bool):
    rows = rows_of_all_ranks(7, dtype)
    for root in range(comm.size):
        for op, reduction in REDUCTIONS.items():
            send = rows[comm.rank].copy()
            recv = send if in_place else np.zeros_like(send)
            comm.reduce(pointer(send), pointer(recv), 7, dtype, op, root, 0)
            if comm.rank == root:
                expected = reduction(rows)
            else:
                expected = rows[comm.rank] if in_place else np.zeros_like(send)
            assert_equal((op, root), recv, expected)


@pytest.mark.parallel([1, 2, 3])
@every_dtype
@in_place_or_not
def test_broadcast(comm: NcclCommunicator, dtype: str, in_place: bool):
    for n_elems in SIZES:
        rows = rows_of_all_ranks(n_elems, dtype)
        for root in range(comm.size):
            send = rows[comm.rank].copy()
            recv = send if in_place else np.zeros_like(send)
            comm.broadcast(pointer(send), pointer(recv), n_elems, dtype, root, 0)
            assert_equal((root, n_elems), recv, rows[root])


@pytest.mark.parallel([1, 2, 3])
@every_dtype
@in_place_or_not
def test_reduce_scatter(comm: NcclCommunicator, dtype: str, in_place: bool):
    for n_elems in SIZES:
        rows = rows_of_all_ranks(comm.size * n_elems, dtype)
        own = slice(comm.rank * n_elems, (comm.rank + 1) * n_elems)
        for op, reduction in REDUCTIONS.items():
            send = rows[comm.rank].copy()
            recv = send[own] if in_place else np.zeros(n_elems, send.dtype)
            comm.reduce_scatter(pointer(send), pointer(recv), n_elems, dtype, op, 0)
            assert_equal((op, n_elems), recv, reduction(rows)[own])


@pytest.mark.parallel([1, 2, 3])
@every_dtype
@in_place_or_not
def test_all_gather(comm: NcclCommunicator, dtype: str, in_place: bool):
    for n_elems in SIZES:
        rows = rows_of_all_ranks(n_elems, dtype)
        recv = np.zeros_like(rows)
        send = recv[comm.rank] if in_place else np.zeros(n_elems, rows.dtype)
        send[...] = rows[comm.rank]
        comm.all_gather(pointer(send), pointer(recv), n_elems, dtype, 0)
        assert_equal(n_elems, recv, rows)


@pytest.mark.parallel([1, 2, 3])
@every_dtype
def test_send_and_recv_round_a_ring(comm: NcclCommunicator, dtype: str):
    dest, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for n_elems in SIZES:
        rows = rows_of_all_ranks(n_elems, dtype)
        send, recv = rows[comm.rank].copy(), np.zeros_like(rows[0])
        comm.binding.group_start()
        comm.send(pointer(send), n_elems, dtype, dest, 0)
        comm.recv(pointer(recv), n_elems, dtype, source, 0)
        comm.binding.group_end()
        assert_equal(n_elems, recv, rows[source])


@pytest.mark.parallel([2, 3])
def test_send_and_recv_without_a_group(comm: NcclCommunicator):
    value = np.array([comm.rank + 1.5])
    if comm.rank == 0:
        for dest in range(1, comm.size):
            comm.send(pointer(value), 1, "float64", dest, 0)
    else:
        comm.recv(pointer(value), 1, "float64", 0, 0)
    assert_equal("value", value, np.array([1.5]))


@pytest.mark.parallel([1, 2, 3])
def test_a_group_of_exchanges_among_all_ranks(comm: NcclCommunicator):
    send = np.arange(comm.size, dtype=np.int64) + 10 * comm.rank
    recv = np.zeros_like(send)
    comm.binding.group_start()
    for other in range(comm.size):
        comm.send(pointer(send[other:]), 1, "int64", other, 0)
        comm.recv(pointer(recv[other:]), 1, "int64", other, 0)
    comm.binding.group_end()
    expected = 10 * np.arange(comm.size, dtype=np.int64) + comm.rank
    assert_equal("exchange", recv, expected)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("maker", ["first", "last"])
@pytest.mark.parametrize("names", [("cupy", "pynccl"), ("pynccl", "cupy")])
def test_bindings_of_different_ranks_understand_each_other(names, maker: str):
    """Neighbouring ranks have different bindings; the id comes from either."""
    bindings = [nccl.load_emulated(name) for name in names]
    binding = bindings[WORLD.rank % 2]
    root = 0 if maker == "first" else WORLD.size - 1
    unique_id = WORLD.bcast(binding.create_unique_id(), root)
    comm = binding.init_rank(WORLD.size, unique_id, WORLD.rank)
    assert_all_ranks(RANKS, len(unique_id) == UNIQUE_ID_BYTES)
    assert_all_ranks(RANKS, (comm.rank, comm.size) == (WORLD.rank, WORLD.size))
    value = np.array([comm.rank + 1], "float32")
    comm.all_reduce(pointer(value), pointer(value), 1, "float32", "sum", 0)
    comm.check_async_error()
    comm.destroy()
    total = WORLD.size * (WORLD.size + 1) / 2
    assert_equal(binding.name, value, np.array([total], "float32"))


def need_split(comm: NcclCommunicator) -> None:
    if not comm.binding.has_split:
        pytest.skip(f"{comm.binding} cannot split")


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("name", ["cupy"], indirect=True)
def test_split_makes_a_communicator_for_each_color(comm: NcclCommunicator):
    need_split(comm)
    # Ranks 0 and 2, in reverse order, and rank 1.
    part = comm.split(comm.rank % 2, -comm.rank)
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    assert_all_ranks(RANKS, part is not None)
    place = (part.rank, part.size)
    assert_all_ranks(RANKS, place == (members.index(comm.rank), len(members)))
    got = np.zeros(part.size, "int32")
    mine = np.array([comm.rank], "int32")
    part.all_gather(pointer(mine), pointer(got), 1, "int32", 0)
    assert_equal("members", got, np.array(members, "int32"))
    part.destroy()


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("name", ["cupy"], indirect=True)
def test_split_leaves_those_without_a_color_out(comm: NcclCommunicator):
    need_split(comm)
    part = comm.split(None if comm.rank == 0 else 5, comm.rank)
    if comm.rank == 0:
        assert_all_ranks(RANKS, part is None)
    else:
        place = (part.rank, part.size)
        assert_all_ranks(RANKS, place == (comm.rank - 1, comm.size - 1))
        part.destroy()
    # The parent goes on working.
    value = np.array([1.0])
    comm.all_reduce(pointer(value), pointer(value), 1, "float64", "sum", 0)
    assert_equal("parent", value, np.array([float(comm.size)]))
