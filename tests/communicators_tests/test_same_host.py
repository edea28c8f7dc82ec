"""Ranks of one host that work in each other's memory."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers.jobs import run_job
from helpers.ranks import assert_all_ranks

from communicators import ArraySpec, CommunicatorError, create_communicator
from communicators.devices.host import nccl_takes_host_memory
from communicators.transports.cross_memory import MAX_PIECES, Process, address_of
from communicators.transports.flags import N_SLOTS, Flags
from communicators.transports.host_arrays import (
    BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    ArraysPlan,
)

pytestmark = pytest.mark.skipif(
    nccl_takes_host_memory(), reason="NumPy arrays travel by NCCL here"
)
parallel = pytest.mark.parallel([2, 3, 4])
F4 = np.dtype("f4")

#: Bytes and shapes: within a block, over several, many pieces, nothing at all.
SHAPES = [(3, 5), (), (0, 4), (BLOCK_BYTES // 4 + 7,), (1, 200_001), (2,), (511, 3)]


def random_arrays(rank: int, dtype: str = "f4") -> list[np.ndarray]:
    """Return arrays of one rank, which any rank can make."""
    rng = np.random.default_rng(rank)
    return [
        np.asarray(rng.standard_normal(shape) * 100).astype(dtype) for shape in SHAPES
    ]


def is_direct(comm) -> bool:
    """Tell whether the ranks reach each other's memory."""
    return comm.world_ring().same_host is not None


@parallel
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "c16", ">f4"])
def test_a_mean_is_the_sum_in_the_order_of_the_ranks_scaled(flat, dtype):
    assert is_direct(flat), flat.why_mpi_in_host
    arrays = random_arrays(flat.rank, dtype)
    flat.allreduce_arrays(arrays)
    wide = np.result_type(dtype, "f4") if dtype == "f2" else np.dtype(dtype)
    scale = wide.newbyteorder("=").type(1 / flat.size)
    for i, array in enumerate(arrays):
        terms = [
            random_arrays(rank, dtype)[i].astype(wide.newbyteorder("="))
            for rank in range(flat.size)
        ]
        expected = terms[0]
        for term in terms[1:]:
            expected = expected + term
        same = np.array_equal(array, (expected * scale).astype(dtype))
        assert_all_ranks(flat, same and array.dtype == dtype, f"{SHAPES[i]}")


@parallel
@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_mean_is_finite_where_the_sum_is_not(wire):
    large = 3e38 if wire is None else 60_000.0
    with create_communicator("flat", allreduce_grad_dtype=wire) as comm:
        arrays = [
            np.full(shape, large * (-1) ** i, "f4") for i, shape in enumerate(SHAPES)
        ]
        comm.allreduce_arrays(arrays)
        ok = all(
            np.allclose(a, large * (-1) ** i, rtol=1e-3) for i, a in enumerate(arrays)
        )
        assert_all_ranks(comm, ok, f"{arrays[0]}")
        # A sum that is asked for is as large as it is.
        total = np.full(3, large, "f4")
        comm.allreduce_arrays([total, np.array([np.inf, -np.inf, np.nan])], op="sum")
        assert_all_ranks(comm, np.isinf(total).all(), f"{total}")


@parallel
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_integers_come_out_exactly(flat, op):
    arrays = [np.arange(70_000) % 5 + flat.rank, np.full(3, flat.rank + 1, "i2")]
    flat.allreduce_arrays(arrays, op=op)
    for i, first in enumerate([np.arange(70_000) % 5, np.full(3, 1, "i2")]):
        ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}.get(
            op, np.multiply
        )
        expected = ufunc.reduce([first + r for r in range(flat.size)], axis=0)
        assert_all_ranks(flat, np.array_equal(arrays[i], expected), f"{op} {i}")


@parallel
def test_layouts_differ_between_ranks_and_some_ranks_lack_arrays(flat):
    n = 300
    whole = np.full((n, n), flat.rank + 1.0, "f4")
    if flat.rank == 0:
        whole = np.asfortranarray(whole)
    elif flat.rank == 1:
        whole = np.full((2 * n, n), flat.rank + 1.0, "f4")[::2]
    lacking = np.full(5, 7.0, "f4") if flat.rank == 1 else ArraySpec((5,), F4)
    nobody = ArraySpec((9,), F4)
    out = flat.allreduce_arrays([whole, lacking, nobody], op="sum")
    ok = (whole == flat.size * (flat.size + 1) / 2).all() and out[0] is whole
    ok = ok and (out[1] == 7).all() and out[2] is None
    assert_all_ranks(flat, ok, f"{whole}, {out}")


@parallel
def test_ten_thousand_small_arrays(flat):
    arrays = [np.full(i % 7, flat.rank + i, "f8") for i in range(10_000)]
    flat.allreduce_arrays(arrays)
    shift = (flat.size - 1) / 2
    ok = all(np.allclose(a, i + shift, rtol=1e-15) for i, a in enumerate(arrays))
    assert_all_ranks(flat, ok, "a mean is wrong")


@parallel
def test_each_byte_is_copied_twice_for_every_other_rank_and_the_ranks_meet_twice(flat):
    arrays = [np.full(shape, 1.0, "f4") for shape in SHAPES]
    transport = flat.world_ring().same_host
    stages = []
    real = transport._flags.raise_own
    transport._flags.raise_own = lambda *args: (stages.append(args[1]), real(*args))
    before = flat.sent_bytes["world"]
    flat.allreduce_arrays(arrays)
    copied = flat.mpi_comm.allgather(flat.sent_bytes["world"] - before)
    nbytes = sum(a.nbytes for a in arrays)
    ok = sum(copied) == 2 * (flat.size - 1) * nbytes
    # Evenly, but for a block.
    ok = ok and max(copied) - min(copied) <= 4 * (flat.size - 1) * BLOCK_BYTES
    assert_all_ranks(flat, ok and stages == [1, 2], f"{copied}, {stages}")


@parallel
@pytest.mark.parametrize("name", ["flat", "hierarchical", "multi_ring", "auto"])
def test_the_road_by_mpi_gives_the_same_numbers(name, monkeypatch):
    ways = []
    for value in ("1", "0"):
        monkeypatch.setenv("CHAINERMN_NG_CROSS_MEMORY", value)
        with create_communicator(name, timeout_s=60) as comm:
            arrays = random_arrays(comm.rank)
            comm.allreduce_arrays(arrays)
            single = comm.allreduce(random_arrays(comm.rank)[3], op="max")
            ways.append((arrays, single))
            reason = comm.why_mpi_in_host
            if value == "0" and name != "auto":
                said = "CHAINERMN_NG_CROSS_MEMORY=0"
                assert_all_ranks(comm, reason == said, f"{reason}")
            close = all(
                np.allclose(a, b, rtol=1e-5, atol=1e-4)
                for a, b in zip(ways[0][0], arrays, strict=True)
            )
            same = np.array_equal(ways[0][1], single)
            assert_all_ranks(comm, close and same, name)


@parallel
@pytest.mark.parametrize("n_elems", [1, 2, 5, 130_001])
def test_flat_buffers(flat, n_elems):
    def whole(rank):
        return np.arange(n_elems, dtype="f8") * (rank + 1)

    transport = flat.world_ring().same_host
    root = flat.size - 1
    total = sum(range(1, flat.size + 1)) * np.arange(n_elems)

    def run(steps):
        return flat.start_steps(steps).wait()

    data = whole(flat.rank)
    run(transport.all_reduce(data, "sum", flat.next_tag()))
    assert_all_ranks(flat, np.array_equal(data, total), "all_reduce")
    data = whole(flat.rank)
    run(transport.reduce(data, "sum", flat.next_tag(), root))
    ok = flat.rank != root or np.array_equal(data, total)
    assert_all_ranks(flat, ok, "reduce")
    data = whole(flat.rank)
    run(transport.broadcast(data, flat.next_tag(), root))
    assert_all_ranks(flat, np.array_equal(data, whole(root)), "broadcast")
    data = whole(flat.rank)
    part = run(transport.reduce_scatter(data, "max", flat.next_tag()))
    bounds = [n_elems * r // flat.size for r in range(flat.size + 1)]
    mine = slice(bounds[flat.rank], bounds[flat.rank + 1])
    ok = np.array_equal(part, whole(flat.size - 1)[mine])
    assert_all_ranks(flat, ok, "reduce_scatter")


@pytest.mark.parallel([2])
def test_buckets_in_flight_do_not_mix(flat):
    transport = flat.world_ring().same_host
    buffers = [np.full(1000 + i, flat.rank + i, "i8") for i in range(100)]
    handles = [
        flat.start_steps(transport.all_reduce(buffer, "sum", flat.next_tag()))
        for buffer in buffers
    ]
    for handle in reversed(handles):
        handle.wait()
    ok = all((b == 2 * i + 1).all() for i, b in enumerate(buffers))
    assert_all_ranks(flat, ok, "a sum is wrong")


CHUNKS = """
import numpy as np
from communicators import create_communicator
with create_communicator(
    "multi_ring", topology="2x2", n_chunks=64, bucket_bytes=2**24, timeout_s=30
) as comm:
    array = np.full(40 * 2**20 // 4, comm.rank + 1.0, "f4")
    comm.allreduce_arrays([array, np.full(7, 1.0, "f4")] * 1, op="sum")
    assert (array == 10).all(), array
    print("right", flush=True)
"""


def test_many_chunks_in_flight_within_hosts_and_between_them():
    job = run_job(4, ["-c", CHUNKS], timeout_s=100)
    assert job.returncode == 0, job.output
    assert job.stdout.count("right") == 4, job.output


@pytest.mark.parallel([3])
def test_overflow_of_one_array_leaves_the_bits_of_others(flat):
    def mean_of(*arrays):
        flat.allreduce_arrays(list(arrays))
        return arrays

    def ordinary():
        return np.random.default_rng(flat.rank).standard_normal(1000).astype("f4")

    large = np.full(1000, 3e38, "f4")
    large[::2] = 1 + flat.rank
    (alone,) = mean_of(ordinary())
    _, beside, _ = mean_of(large, ordinary(), np.full(1000, 3e38, "f4"))
    ok = np.array_equal(alone, beside)
    ok = ok and np.allclose(large[1::2], 3e38) and (large[::2] == 2).all()
    assert_all_ranks(flat, ok, f"{alone[:3]} {beside[:3]} {large[:3]}")


@parallel
@pytest.mark.parametrize("value", ["0", "1"])
def test_arrays_that_overlap_are_reduced_as_if_they_were_apart(value, monkeypatch):
    monkeypatch.setenv("CHAINERMN_NG_CROSS_MEMORY", value)
    with create_communicator("flat") as comm:
        n = 300_000
        base = np.full(2 * n, 1.0, "f4")
        rows = np.frombuffer(memoryview(bytearray(4 * n)), "f4")
        rows[:] = 1
        twin = np.frombuffer(rows.data, "f4")
        views = [base[:n], base[n // 2 : n // 2 + n], rows, twin, base[: 2 * n : 2]]
        comm.allreduce_arrays(views, op="sum")
        ok = (rows == comm.size).all() and (base[: n // 2 + n] == comm.size).all()
        assert_all_ranks(comm, ok, f"{set(base.tolist())} {set(rows.tolist())}")


FAILING = """
import sys, time
import numpy as np
import communicators
from communicators.errors import CommunicatorError
from communicators.transports.cross_memory import Process

comm = communicators.create_communicator("flat", timeout_s=30)
array = np.full(500_000, 1.0, "f4")
comm.allreduce_arrays([array])
if comm.rank == 1:
    def broken(self, *args):
        raise CommunicatorError("cannot read: it is gone")
    Process.read_pieces = broken
start = time.monotonic()
try:
    comm.allreduce_arrays([array])
except CommunicatorError as error:
    print(comm.rank, error, time.monotonic() - start < 10, flush=True)
"""


def test_a_rank_that_fails_in_the_middle_tells_the_others_at_once():
    job = run_job(2, ["-c", FAILING], timeout_s=60)
    assert "1 cannot read: it is gone True" in job.stdout, job.output
    told = "rank 1 stopped in the middle of it: CommunicatorError: cannot read"
    assert told in job.stdout, job.output
    assert job.stdout.count("True") == 2, job.output


STOPPED = """
import os, signal, sys, threading, time
import numpy as np
import communicators
from communicators.transports import same_host

comm = communicators.create_communicator("flat", timeout_s=3)
array = np.full(3_000_000, comm.rank + 1.0, "f4")
comm.allreduce_arrays([array])
if comm.rank == 1:
    real = same_host.reduce_blocks
    def late(*args):
        time.sleep(6)
        return real(*args)
    same_host.reduce_blocks = late
try:
    comm.allreduce_arrays([array])
except communicators.CommunicatorError as error:
    print(type(error).__name__, flush=True)
array.fill(-5)
# The one that leaves first ends the job.
time.sleep(6 if comm.rank == 0 else 20)
print("rank", comm.rank, "kept", (array == -5).all(), flush=True)
os._exit(0)
"""


def test_nothing_is_written_into_arrays_that_a_rank_has_given_up():
    job = run_job(
        2,
        ["-c", STOPPED],
        timeout_s=60,
        env={"CHAINERMN_NG_ABORT_ON_EXCEPTION": "0"},
    )
    assert "rank 0 kept True" in job.stdout, job.output
    assert "CommunicationTimeoutError" in job.stdout, job.output


SETTING = """
import communicators
from mpi4py import MPI
import os
os.environ["CHAINERMN_NG_CROSS_MEMORY"] = str(MPI.COMM_WORLD.rank) + SUFFIX
with communicators.create_communicator("flat") as comm:
    comm.world_ring()
    print(comm.why_mpi_in_host, flush=True)
"""


def test_one_rank_that_stays_away_sends_all_by_mpi():
    job = run_job(2, ["-c", SETTING.replace("SUFFIX", "''")], timeout_s=60)
    assert job.returncode == 0, job.output
    assert job.stdout.count("CHAINERMN_NG_CROSS_MEMORY=0") == 2, job.output


CAUGHT = """
import os
import communicators
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    os.environ["CHAINERMN_NG_CROSS_MEMORY"] = "2"
try:
    communicators.create_communicator("flat", timeout_s=20)
except ValueError as error:
    print(error, flush=True)
"""


def test_a_setting_that_is_none_on_one_rank_is_an_error_on_all():
    job = run_job(2, ["-c", CAUGHT], timeout_s=60)
    text = "CHAINERMN_NG_CROSS_MEMORY='2': expected 0 or 1"
    assert job.stdout.count(text) == 2, job.output


def test_memory_of_a_process_that_is_not_there():
    gone = Process(2**22 + 1, "rank 7")
    with pytest.raises(
        CommunicatorError, match=r"memory of rank 7 \(process 4194305\)"
    ):
        gone.read_into(np.empty(3), 4096)
    here = Process(os.getpid(), "rank 0")
    with pytest.raises(CommunicatorError, match="read from the memory of rank 0"):
        here.read_into(np.empty(3), 8)
    source, target = np.arange(5.0), np.empty(5)
    here.read_into(target, address_of(source))
    assert np.array_equal(source, target)


def test_flags_of_operations_a_round_apart_are_told_apart():
    memory = np.zeros(Flags.nbytes_for(2), np.uint8)
    one, two = Flags(memory, 0, 2), Flags(memory, 1, 2)
    waits = one.all_at(5, 2)
    assert not waits.Test()
    two.raise_own(5, 1, 77)
    assert not waits.Test()
    assert one.all_at(5, 1).Test()
    two.raise_own(5, 2)
    assert waits.Test()
    assert one.values(5)[1] == 77
    assert not one.all_at(5 + N_SLOTS, 1).Test()
    two.raise_own(5 + N_SLOTS, 1, 78)
    assert one.all_at(5 + N_SLOTS, 1).Test()
    # Whoever still waits for the earlier one knows that it is over.
    assert one.all_at(5, 2).Test()


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
def test_a_plan_gives_every_element_to_one_rank(n_ranks):
    f2, f8 = np.dtype("f2"), np.dtype("f8")
    sizes = [(300_000, F4, F4), (0, F4, F4), (5, f2, F4), (99_999, f8, f8)]
    sizes += [(1, F4, F4)] * 3000
    plan = ArraysPlan(sizes, n_ranks)
    seen = [np.zeros(n, int) for n, _, _ in sizes]
    shares = []
    for rank in range(n_ranks):
        blocks = plan.blocks_of(rank)
        shares.append(sum(b.n_elems * b.dtype.itemsize for b in blocks))
        for block in blocks:
            assert len(block.indices) <= MAX_PIECES
            assert block.n_elems * block.wire.itemsize <= BLOCK_BYTES
            kind = (block.dtype, block.wire)
            for i, start, n in zip(
                block.indices, block.starts, block.lengths, strict=True
            ):
                assert sizes[i][1:] == kind
                seen[i][start : start + n] += 1
    assert all((counts == 1).all() for counts in seen)
    assert max(shares) - min(shares) <= 2 * BLOCK_BYTES


def test_a_small_load_is_shared_as_well():
    plan = ArraysPlan([(16 * 1024, F4, F4)], 4)
    shares = [sum(b.n_elems for b in plan.blocks_of(r)) for r in range(4)]
    assert shares == [4096] * 4
    assert MIN_BLOCK_BYTES <= 16 * 1024
