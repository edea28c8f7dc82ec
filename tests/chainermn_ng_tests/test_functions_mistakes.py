"""Mistakes in differentiable collectives: one clear error on all ranks."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from helpers.errors import assert_all_raise, raised_by
from helpers.jobs import run_job
from helpers.ranks import assert_all_ranks

from chainermn_ng import functions
from communicators import MismatchError

several = pytest.mark.parallel([2, 3])


@several
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("allgather", ()),
        ("bcast", (0,)),
        ("gather", (0,)),
        ("allreduce", ()),
        ("reduce_scatter", ()),
        ("alltoall", ()),
        ("scatter", (0,)),
    ],
)
def test_no_array_on_one_rank(comm, function, arguments):
    x = np.ones((comm.size, 2), "f")
    for bad in (None, "text", [1, 2, 3, 4][: comm.size]):
        if bad is None and comm.rank == 0 and function in ("alltoall", "scatter"):
            texts = ("expected a sequence",)
        else:
            texts = ("functions." + function,)
        assert_all_raise(
            comm,
            lambda bad=bad: getattr(functions, function)(
                comm, bad if comm.rank == 0 else x, *arguments
            ),
            TypeError,
            "rank 0",
            *(texts if comm.rank == 0 else ()),
        )


@several
def test_wrong_numbers_roots_and_operations(comm):
    x = np.ones((comm.size, 2), "f")
    more = [x] * (comm.size + 1)
    cases = [
        (lambda: functions.alltoall(comm, more), f"expected {comm.size}"),
        (
            lambda: functions.scatter(comm, more if comm.rank == 0 else None),
            f"expected {comm.size}",
        ),
        (lambda: functions.bcast(comm, x, comm.size), "no rank"),
        (lambda: functions.gather(comm, x, None), "no rank"),
        (lambda: functions.scatter(comm, x, -1), "no rank"),
        (lambda: functions.allreduce(comm, x, "prod"), "sum, mean, max, min"),
        (lambda: functions.reduce_scatter(comm, np.ones((7, 2))), "rows"),
    ]
    for function, text in cases:
        assert_all_raise(comm, function, ValueError, text)


@several
def test_integers_have_no_gradient(comm):
    dtype = "i4" if comm.rank == 0 else "f4"
    x = np.ones((comm.size, 2), dtype)
    for function in (functions.allreduce, functions.reduce_scatter):
        assert_all_raise(comm, lambda f=function: f(comm, x), TypeError, "int32")


@several
def test_different_calls(comm):
    x = np.ones(2, "f")
    first = comm.rank == 0
    for function in (
        lambda: (functions.allgather if first else functions.allreduce)(comm, x),
        lambda: functions.bcast(comm, x, 0 if first else 1),
        lambda: functions.allreduce(comm, x, "sum" if first else "mean"),
        lambda: functions.allreduce(comm, np.ones(2 + first, "f")),
    ):
        assert_all_raise(comm, function, MismatchError)


@several
def test_a_graph_on_some_ranks_only(comm):
    def call():
        with chainer.using_config("enable_backprop", comm.rank > 0):
            functions.allreduce(comm, np.ones(2, "f"))

    assert_all_raise(comm, call, MismatchError, "enable_backprop=False on rank 0")


@several
def test_a_rank_that_does_not_reach_the_function(comm):
    y = functions.allreduce(comm, chainer.Variable(np.ones(2, "f")))

    def call():
        if comm.rank == 0:
            comm.barrier()
        else:
            F.sum(y).backward()

    assert_all_raise(
        comm, call, MismatchError, "backward pass of functions.allreduce, call 1"
    )


STAYING_AWAY = """
import sys
import chainermn_ng
import numpy as np
from chainer import functions as F
from chainermn_ng import functions
from communicators import CommunicationTimeoutError

comm = chainermn_ng.create_communicator("flat", timeout_s=1)
y = functions.bcast(comm, np.ones(2, "f"))
if comm.rank > 0:
    try:
        F.sum(y).backward()
    except CommunicationTimeoutError as error:
        print(f"rank {comm.rank}: {error}", flush=True)
comm.mpi_comm.barrier()
"""


def test_a_rank_that_stays_away_is_named():
    result = run_job(2, ["-c", STAYING_AWAY], timeout_s=30)
    assert result.stdout.startswith("rank 1: backward pass of functions.bcast, call 1")
    assert "ranks [0] of 2 did not come" in result.stdout, result.output
    assert "pseudo_connect" in result.stdout, result.output


@several
def test_backward_passes_in_another_order(comm):
    """Of two calls alike: taken for each other, the gradients would be swapped."""
    x = chainer.Variable(np.ones(2, "f"))
    ys = [functions.allreduce(comm, x) for _ in range(2)]
    assert_all_raise(
        comm,
        lambda: F.sum(ys[0] if comm.rank == 0 else ys[1]).backward(),
        MismatchError,
        "call 1",
        "call 2",
    )


@several
def test_second_derivatives_are_refused(comm):
    x = chainer.Variable(np.ones(2))
    y = functions.allreduce(comm, x * x)
    (gx,) = chainer.grad([F.sum(y)], [x], enable_double_backprop=True)
    assert_all_ranks(comm, np.allclose(gx.array, 2 * comm.size), f"{gx}")
    assert_all_raise(comm, F.sum(gx * gx).backward, RuntimeError, "allreduce")


@several
def test_a_parameter_without_a_shape(comm):
    assert_all_raise(
        comm,
        lambda: functions.bcast(comm, chainer.Parameter()),
        TypeError,
        "not initialised",
    )


@pytest.mark.parallel(2)
def test_an_mpi_communicator_is_refused(comm):
    error = raised_by(lambda: functions.allreduce(comm.mpi_comm, np.ones(2)))
    ok = isinstance(error, TypeError) and "create_communicator" in str(error)
    assert_all_ranks(comm, ok, repr(error))
