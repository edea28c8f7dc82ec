"""CHAINERMN_NG_DEBUG=1: what the ranks compare, and what errors tell of it."""

from __future__ import annotations

import os

import chainer
import numpy as np
import pytest
from chainer import links as L
from helpers.errors import assert_all_raise, raised_by
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

import chainermn_ng
from communicators import MismatchError, create_communicator
from communicators.debugging import DEBUG_VARIABLE

HERE = os.path.basename(__file__)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with chainermn_ng.create_communicator("flat", timeout_s=30) as comm:
        yield comm


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("on", True), ("0", False), ("", False)]
)
def test_the_variable_turns_it_on(monkeypatch, value, expected):
    monkeypatch.setenv(DEBUG_VARIABLE, value)
    with create_communicator("naive") as comm:
        assert_all_ranks(comm, comm.is_debugging is expected, value)
        part = comm.split(0)
        assert part.is_debugging is expected
        part.finalize()


@pytest.mark.parallel([1, 2])
def test_a_value_that_is_none_is_an_error_on_all_ranks(monkeypatch):
    if MPI.COMM_WORLD.rank == 0:
        monkeypatch.setenv(DEBUG_VARIABLE, "maybe")
    error = raised_by(lambda: create_communicator("naive"))
    texts = MPI.COMM_WORLD.allgather(f"{type(error).__name__}: {error}")
    for text in texts:
        assert text.startswith("ValueError"), text
        assert "CHAINERMN_NG_DEBUG='maybe': expected 1 (on) or 0 (off)" in text, text


@pytest.mark.parallel(2)
def test_on_one_rank_only_is_an_error(monkeypatch):
    monkeypatch.setenv(DEBUG_VARIABLE, str(MPI.COMM_WORLD.rank))
    error = raised_by(lambda: create_communicator("naive"))
    texts = MPI.COMM_WORLD.allgather(f"{type(error).__name__}: {error}")
    for text in texts:
        assert text.startswith("MismatchError"), text
        assert "debug mode" in text, text


def _two_calls(comm, first, second):
    """Call one thing on rank 0 and another one on the others, on different lines."""
    if comm.rank == 0:
        first()
    else:
        second()


# Each takes the communicator.
COLLECTIVES = {
    "allgather": lambda c: c.allgather(np.ones(2, np.float32)),
    "allgather_obj": lambda c: c.allgather_obj("x"),
    "allreduce": lambda c: c.allreduce(np.ones(3)),
    "allreduce_obj": lambda c: c.allreduce_obj(1),
    "allreduce_arrays": lambda c: c.engine.allreduce_arrays([np.ones(3)]),
    "alltoall": lambda c: c.alltoall([np.ones(3)] * c.size),
    "alltoall_obj": lambda c: c.alltoall_obj([1] * c.size),
    "barrier": lambda c: c.barrier(),
    "bcast": lambda c: c.bcast(np.ones(3)),
    "bcast_arrays": lambda c: c.engine.bcast_arrays([np.ones(3)]),
    "bcast_obj": lambda c: c.bcast_obj({}),
    "gather": lambda c: c.gather(np.ones(3)),
    "gather_obj": lambda c: c.gather_obj(1),
    "reduce_scatter": lambda c: c.reduce_scatter(np.ones((c.size, 2))),
    "scatter": lambda c: c.scatter([np.ones(3)] * c.size),
    "scatter_obj": lambda c: c.scatter_obj([1] * c.size),
    "split": lambda c: c.split(0, 0),
}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n != "allreduce"])
def test_every_collective_is_compared_and_its_place_is_told(debug, name):
    line = COLLECTIVES[name].__code__.co_firstlineno
    other_line = COLLECTIVES["allreduce"].__code__.co_firstlineno
    who = "rank 1" if debug.size == 2 else "ranks 1, 2"
    assert_all_raise(
        debug,
        lambda: _two_calls(
            debug,
            lambda: COLLECTIVES[name](debug),
            lambda: COLLECTIVES["allreduce"](debug),
        ),
        MismatchError,
        "the ranks are in different operations: ",
        f"rank 0: {name}",
        f"{who}: allreduce of shape (3,) float64",
        f"{HERE}:{line} on rank 0",
        f"{HERE}:{other_line} on {who}",
    )


@pytest.mark.parallel([2, 3])
def test_the_place_is_told_without_the_debug_mode_too(comm):
    assert not comm.engine.is_debugging
    assert_all_raise(
        comm,
        lambda: _two_calls(comm, lambda: comm.allgather_obj(1), comm.barrier),
        MismatchError,
        "rank 0: allgather_obj of int; rank",
        "called from",
        f"{HERE}:",
        " on rank 0, ",
    )


@pytest.mark.parallel([2, 3])
def test_the_numbers_of_collectives_are_compared(debug):
    debug.engine._agreement.sequence += debug.rank  # as if some had been lost
    assert_all_raise(
        debug,
        debug.barrier,
        MismatchError,
        "barrier: the ranks have called different numbers of collectives; this one is",
        " on rank 0, ",
    )


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", ["gather", "allgather", "alltoall"])
def test_arrays_that_may_differ_are_compared_in_all_but_their_lengths(debug, name):
    def call(array):
        data = [array] * debug.size if name == "alltoall" else array
        return getattr(debug, name)(data)

    rank = debug.rank
    received = call(np.full((rank + 1, 2), rank, np.float32))
    assert_all_ranks(debug, name == "gather" or len(received) == debug.size)
    for mine, texts in (
        (np.ones(3, f"f{4 if rank else 8}"), ("float64 on rank 0", "float32 on rank")),
        (np.ones((3,) * min(rank + 1, 2)), ("1-dimensional", "2-dimensional")),
    ):
        assert_all_raise(
            debug, lambda mine=mine: call(mine), MismatchError, name, *texts
        )


@pytest.mark.parallel([2, 3])
def test_other_dtypes_may_be_gathered_without_the_debug_mode(comm):
    found = comm.allgather(np.ones(3, "f4" if comm.rank else "i8"))
    assert_all_ranks(comm, found[0].dtype == np.int64 and found[1].dtype == np.float32)


@pytest.mark.parallel(2)
def test_an_array_for_an_object_is_an_error_and_the_next_message_arrives(debug):
    if debug.rank == 0:
        debug.send(np.ones(3), 1)
        debug.send_obj([1], 1)
        debug.send_obj("next", 1)
    else:
        with pytest.raises(TypeError, match="rank 0 sent arrays, by send; receive"):
            debug.recv_obj(0)
        with pytest.raises(TypeError, match="rank 0 sent an object, by send_obj"):
            debug.recv(0)
        assert debug.recv_obj(0) == "next"
    debug.barrier()


def _optimizer(comm, **options):
    model = L.Linear(3, 2)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, **options
    )
    optimizer.setup(model)
    return model, optimizer


def _loss(model):
    return chainer.functions.sum(model(np.ones((2, 3), np.float32)))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_equal_weights_pass(debug, double_buffering):
    model, optimizer = _optimizer(debug, double_buffering=double_buffering)
    for _ in range(3):
        optimizer.update(_loss, model)
    optimizer.flush()
    assert_all_ranks(debug, optimizer.t == 3, f"{optimizer.t}")


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("horovod/horovod#526", "chainer/chainermn#73")
def test_weights_that_differ_are_named_after_the_step(debug):
    model, optimizer = _optimizer(debug)
    optimizer.update(_loss, model)
    if debug.rank == 1:
        model.b.array[0] += 1e-3
    assert_all_raise(
        debug,
        lambda: optimizer.update(_loss, model),
        MismatchError,
        "weights after step 2: the ranks hold different arrays: /b: values ",
        " on rank 1",
        HERE,
    )


@pytest.mark.parallel(2)
def test_without_the_debug_mode_a_step_sends_no_more(comm, monkeypatch):
    def messages_of(comm):
        model, optimizer = _optimizer(comm)
        optimizer.update(_loss, model)
        before = comm.engine._agreement.sequence
        optimizer.update(_loss, model)
        return comm.engine._agreement.sequence - before

    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with chainermn_ng.create_communicator("flat", timeout_s=30) as debug:
        assert_all_ranks(debug, messages_of(debug) == 2)
    assert_all_ranks(comm, messages_of(comm) == 1)
