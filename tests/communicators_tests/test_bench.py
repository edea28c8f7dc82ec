"""Timing collectives and comparing communicators; clocks are the tests' own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.ranks import assert_all_ranks, same_everywhere

from communicators import (
    ArraySpec,
    MismatchError,
    RankFailedError,
    create_communicator,
    registry,
)
from communicators.bench import Bench, BenchDevice, Load, Settings
from communicators.bench_candidates import choose_candidates
from communicators.bench_operations import Work, WrongResultError
from communicators.bench_results import BUS_FACTORS
from communicators.candidate import Candidate
from communicators.flat import FlatCommunicator
from communicators.measuring import Timing, measure_allreduce_arrays, time_calls
from communicators.transports.progress import Finished

FEW = Timing(warm_up=1, repetitions=2, budget_s=0.05)
ONE_LOAD = (Load(4096),)


def ticking(seconds):
    """Return a clock that goes on by so many seconds at each reading."""
    readings = itertools.count()
    return lambda: seconds * next(readings)


def settings(*chosen, loads=ONE_LOAD, options=(), **others):
    others = {"timing": FEW, **others}
    return Settings(choose_candidates(chosen, options), loads, **others)


def run(comm, what):
    return Bench(comm, what, BenchDevice()).run()


# -- timing ---


@pytest.mark.parametrize(
    ("first_s", "plan"),
    [
        (0.0, (2, 20)),  # a clock too coarse
        (0.001, (2, 20)),
        (0.1, (2, 10)),  # ten fit into the budget of 1 s
        (0.2, (1, 5)),
        (10.0, (0, 3)),  # never fewer than three
    ],
)
def test_slow_calls_are_repeated_less_often(first_s, plan):
    assert Timing(warm_up=3, repetitions=20, budget_s=1.0).plan(first_s) == plan


def test_who_asks_for_fewer_than_three_gets_them():
    assert Timing(warm_up=0, repetitions=1).plan(99.0) == (0, 1)


@pytest.mark.parametrize(
    "values", [{"warm_up": -1}, {"repetitions": 0}, {"budget_s": 0.0}]
)
def test_a_timing_without_sense_is_refused(values):
    with pytest.raises(ValueError, match="expected at least 0, at least 1, above 0"):
        Timing(**values)


@pytest.mark.parallel([1, 2, 3])
def test_a_repetition_takes_as_long_as_on_its_slowest_rank(flat):
    timing = Timing(2, 4, 100.0, ticking(1.0 + flat.rank))
    times = time_calls(flat, [flat.barrier, flat.barrier], timing)
    assert_all_ranks(flat, times == [[float(flat.size)] * 4] * 2, f"{times}")


@pytest.mark.parallel([1, 2])
def test_calls_take_turns_and_those_that_warm_up_do_not_count(flat):
    made, parts = [], []
    # Calls of 1 s and 20 s: of the second kind 3 are made, without more warming up.
    now = [0.0]

    def call(name, seconds):
        made.append(name)
        now[0] += seconds
        flat.barrier()

    calls = [lambda: call("a", 1.0), lambda: call("b", 20.0)]
    timing = Timing(3, 5, 40.0, lambda: now[0])
    times = time_calls(flat, calls, timing, parts.append)
    assert times == [[1.0] * 5, [20.0] * 3]
    assert "".join(made) == "ab" + "abbaab" + "aaaa"
    assert parts[-1] == 1.0
    assert parts == sorted(parts)


@pytest.mark.parallel([1, 2])
def test_what_a_rank_has_enqueued_is_waited_for(flat):
    log = []
    timing = Timing(0, 1, 1.0, ticking(1.0)).on_device(lambda: log.append("wait"))
    time_calls(flat, [lambda: log.append("call")], timing)
    assert log == ["wait", "call", "wait"] * 2


@pytest.mark.parallel([1, 2])
def test_candidates_are_measured_on_arrays_like_the_given_ones(flat):
    specs = [ArraySpec((3, 4), np.dtype("f4")), ArraySpec((), np.dtype("f2"))]
    with create_communicator("multi_ring", flat.mpi_comm, n_chunks=2) as other:
        timing = Timing(1, 3, 100.0, ticking(2.0 + flat.rank))
        seconds = measure_allreduce_arrays(flat, [flat, other], specs, timing)
        assert_all_ranks(flat, seconds == [1.0 + flat.size] * 2, f"{seconds}")
        # Real ones, too, are the same on all ranks.
        seconds = measure_allreduce_arrays(flat, [flat, other], specs, FEW)
        assert min(seconds) > 0
        assert same_everywhere(flat, seconds)


# -- what is compared ---


def test_candidates_are_read():
    assert choose_candidates(["flat", "multi_ring:dims=2x2,n_chunks=8", "flat"]) == [
        Candidate("mpi"),
        Candidate("flat"),
        Candidate.of("multi_ring", dims=(2, 2), n_chunks=8),
    ]


def test_without_names_all_but_dummy_are_compared():
    names = [candidate.name for candidate in choose_candidates([])]
    assert names[0] == "mpi"
    assert {"auto", "flat", "multi_ring", "naive"} < set(names)
    assert "dummy" not in names


def test_an_option_for_all_goes_to_those_that_have_it():
    chosen = ["flat", "multi_ring", "multi_ring:n_chunks=2"]
    options = ["n_chunks=8", "bucket_bytes=1MiB", "topology=a,b", "timeout_s=None"]
    of_all = {"bucket_bytes": 2**20, "topology": "a,b", "timeout_s": None}
    _, *found = choose_candidates(chosen, options)
    assert [dict(candidate.options) for candidate in found] == [
        of_all,
        {"n_chunks": 8, **of_all},
        {"n_chunks": 2, **of_all},
    ]


@pytest.mark.parametrize(
    ("chosen", "options", "what"),
    [
        (["flatt"], [], "unknown communicator 'flatt'.*Did you mean 'flat'"),
        (["flat", "dummy"], [], "'dummy' sends nothing"),
        (["flat:n_chunks=2"], [], "'flat' has no option 'n_chunks'; its options: top"),
        (["flat"], ["n_chunks=2"], "none of the communicators flat has an option"),
        (["flat"], ["mpi_comm=2"], "none of the communicators flat has an option"),
        (["flat"], ["bucket_bytes"], "'bucket_bytes': expected KEY=VALUE"),
        (["flat:"], [], "'': expected KEY=VALUE"),
        (["flat"], ["timeout_s=1", "timeout_s=2"], "'timeout_s' is given twice"),
        (["flat"], ["allreduce_grad_dtype=float16"], "give --allreduce-grad-dtype"),
    ],
)
def test_bad_candidates_are_refused(chosen, options, what):
    with pytest.raises(ValueError, match=what):
        choose_candidates(chosen, options)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"operation": "gather"}, "'gather': expected one of allreduce_arrays"),
        ({"dtype": "int8"}, "^dtype 'int8': expected"),
        ({"wire_dtype": "int8"}, "allreduce_grad_dtype 'int8'"),
        ({"wire_dtype": "float16", "operation": "bcast"}, "not bcast"),
        ({"loads": [Load(model="vgg16")], "operation": "bcast"}, "not for bcast"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values, what):
    with pytest.raises(ValueError, match=what):
        settings("flat", **values)


# -- results ---


@pytest.mark.parallel([1, 2])
def test_names_that_do_the_same_are_known(flat):
    comm = flat
    is_direct = comm.in_place_group().same_host is not None
    for what, is_one_way in (
        (settings("flat", "naive", "multi_ring"), True),
        (settings("flat"), False),
        (settings("flat", "naive", operation="allreduce"), False),
    ):
        found = run(comm, what)
        assert_all_ranks(comm, found.same_way == (is_one_way and is_direct), f"{what}")
        assert found.machine["is_pretended"] is False


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("operation", BUS_FACTORS)
def test_every_operation_is_measured_and_checked(flat, operation):
    wanted = settings("flat", operation=operation, loads=[Load(4096), Load(1)])
    found = run(flat, wanted)
    assert same_everywhere(flat, found.rows)
    assert [row.communicator for row in found.rows] == ["mpi", "flat"] * 2
    assert all(len(row.times_s) == 2 for row in found.rows)
    in_rows = operation in ("allgather", "reduce_scatter", "alltoall")
    # Whole float32, and the same number for each rank.
    whole = 4096 // 4 // flat.size * flat.size * 4 if in_rows else 4096
    least = 4 * flat.size if in_rows else 4
    assert [row.nbytes for row in found.rows] == [whole] * 2 + [least] * 2


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [("float16", None), ("bfloat16", None), ("float64", "float16")],
)
def test_dtypes_are_those_of_the_arrays_and_of_the_wire(flat, dtype, wire_dtype):
    wanted = settings("flat", "naive", dtype=dtype, wire_dtype=wire_dtype)
    found = run(flat, wanted)
    mpi, *others = found.rows
    assert (mpi.dtype, mpi.wire_dtype) == (dtype, None)
    assert mpi.skipped is None or mpi.skipped.startswith("MPI and ")
    for row in others:
        assert (row.dtype, row.wire_dtype, row.nbytes) == (dtype, wire_dtype, 4096)
        assert row.skipped is None


@pytest.mark.parallel([2])
def test_a_model_is_many_arrays(flat):
    row = run(flat, settings("flat", loads=[Load(model="resnet50")])).rows[1]
    assert (row.load, row.n_arrays, row.nbytes) == ("resnet50", 161, 4 * 25_557_032)


@pytest.mark.parallel([2, 3])
def test_one_that_refuses_the_topology_is_skipped_with_its_reason(flat):
    chosen = ["single_node:topology=" + "+".join("1" * flat.size), "multi_ring:dims=5"]
    *_, apart, wrong_dims = run(flat, settings("flat", *chosen)).rows
    assert apart.times_s == wrong_dims.times_s == ()
    assert "one host" in apart.skipped
    assert "the product must be the number of ranks" in wrong_dims.skipped


class AstrayCommunicator(FlatCommunicator):
    """Gives the last rank another sum."""

    name = "astray"

    def in_place_group(self):
        # Else ranks of one host would not come here.
        return None

    def start_all_reduce_flat(self, buffer, op):
        super().start_all_reduce_flat(buffer, op).wait()
        if self.rank == self.size - 1:
            buffer[-1] += 1
        return Finished()


@pytest.mark.parallel([2, 3])
def test_wrong_numbers_on_one_rank_are_an_error_on_all(flat, monkeypatch):
    monkeypatch.setitem(registry._table, "astray", AstrayCommunicator)
    with pytest.raises(RankFailedError) as caught:
        run(flat, settings("astray"))
    assert f"astray failed on rank {flat.size - 1}" in str(caught.value)
    assert "1 of 1024 values are wrong" in str(caught.value)
    # The ranks are in step.
    flat.barrier()


@pytest.mark.parallel([2])
def test_ranks_with_other_settings_are_told_so(flat):
    with pytest.raises(
        MismatchError, match=r"by mpi, naive,.* on rank 0; .* by mpi, flat,"
    ):
        run(flat, settings("flat" if flat.rank else "naive"))
    flat.barrier()


def test_a_result_is_compared_with_the_place_that_it_belongs_to():
    work = Work("allreduce_arrays", [(500,), (500,)], np.dtype("f4"), 0, 1)
    work.fill()
    work.check(work.arrays)
    with pytest.raises(WrongResultError, match="500 of 500 values are wrong"):
        work.check(work.arrays[::-1])
    work.arrays[1][7] = np.nan
    with pytest.raises(WrongResultError, match=r"1 of 500 .* the first is nan"):
        work.check(work.arrays)


@pytest.mark.parallel([1, 2])
def test_the_machine_is_described(flat):
    machine = run(flat, settings("flat")).machine
    assert machine["ranks"] == flat.size
    assert machine["topology"] == str(flat.topology)
    assert sum(host["ranks"] for host in machine["hosts"]) == flat.size
    assert machine["device"] == "cpu"
    assert machine["packages"]["numpy"] == np.__version__
