"""Messages that gradients pass back through: what is received, used and connected."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from helpers.errors import raised_by
from helpers.ranks import assert_all_ranks

import chainermn_ng
from chainermn_ng import functions
from communicators import CommunicationTimeoutError, MismatchError

several = pytest.mark.parallel([2, 3])
DTYPES = ["?", "i1", "u2", "i8", "f2", "f4", "f8"]


@several
@pytest.mark.reports("chainer/chainermn#139")
def test_one_of_two_received_arrays_is_used(comm):
    ok = True
    if comm.rank == 0:
        x, y = (chainer.Variable(np.ones((2, 3), "f")) for _ in range(2))
        functions.send((x, y), comm, 1).backward()
        ok = (x.grad == 1).all() and (y.grad == 0).all()
    if comm.rank == 1:
        used, _ = functions.recv(comm, 0)
        F.sum(used).backward()
    assert_all_ranks(comm, ok)


@several
@pytest.mark.reports("chainer/chainermn#214")
@pytest.mark.parametrize("kind", ["array", "variable", "tuple"])
def test_sending_what_needs_no_gradient(comm, kind):
    data = np.ones(3, "f")
    if kind == "variable":
        data = chainer.Variable(data, requires_grad=False)
    if kind == "tuple":
        data = (data, chainer.Variable(data, requires_grad=False))
    ok = True
    if comm.rank == 0:
        delegate = functions.send(data, comm, 1)
        ok = delegate.shape == (0,) and delegate.requires_grad
        delegate.backward()
    if comm.rank == 1:
        got = functions.recv(comm, 0, force_tuple=True)
        F.sum(got[0]).backward()
    # Nothing is left behind that a later message could be taken for.
    if comm.rank == 0:
        functions.send(np.full(2, 7.0), comm, 1).backward()
    if comm.rank == 1:
        got = functions.recv(comm, 0)
        ok = (got.array == 7).all()
        F.sum(got).backward()
    assert_all_ranks(comm, ok)


@several
@pytest.mark.reports("chainer/chainermn#265", "chainer/chainermn#267")
def test_every_dtype_travels_with_the_default_tag(comm):
    for dtype in DTYPES:
        ok = True
        if comm.rank == 0:
            functions.send(np.ones(3, dtype), comm, 1)
        if comm.rank == 1:
            got = functions.recv(comm, 0)
            ok = got.dtype == dtype and got.array.all()
        assert_all_ranks(comm, ok, dtype)


@several
def test_half_precision_stays_so_there_and_back(comm):
    ok = True
    if comm.rank == 0:
        x = chainer.Variable(np.ones(3, "f2"))
        functions.send(x, comm, 1).backward()
        ok = x.grad.dtype == "f2" and (x.grad == 2).all()
    if comm.rank == 1:
        y = functions.recv(comm, 0)
        F.sum(2 * y).backward()
        ok = y.dtype == "f2"
    assert_all_ranks(comm, ok)


@several
def test_one_variable_comes_back_as_it_was_sent(comm):
    kinds = []
    if comm.rank == 0:
        for data in ([np.ones(2)], (np.ones(2), np.ones(1)), np.ones(2), np.ones(2)):
            functions.send(data, comm, 1)
    if comm.rank == 1:
        got = [functions.recv(comm, 0) for _ in range(3)]
        got.append(functions.recv(comm, 0, force_tuple=True))
        kinds = [isinstance(data, tuple) for data in got]
    ok = comm.rank != 1 or kinds == [False, True, False, True]
    assert_all_ranks(comm, ok, f"{kinds}")


@several
@pytest.mark.parametrize("connect", ["delegate_variable", "pseudo_connect"])
def test_there_and_back_again(comm, connect):
    """Rank 0 sends, and receives what rank 1 made of it: two parts, one backward."""
    ok = True
    if comm.rank == 0:
        x = chainer.Variable(np.array([1.0, 2.0]))
        delegate = functions.send(x * x, comm, 1)
        if connect == "delegate_variable":
            y = functions.recv(comm, 1, delegate)
        else:
            (y,) = functions.pseudo_connect(delegate, functions.recv(comm, 1))
        F.sum(y).backward()
        ok = np.allclose(x.grad, 4 * x.array**3)
    if comm.rank == 1:
        z = functions.recv(comm, 0)
        functions.send(z * z, comm, 0).backward()
    assert_all_ranks(comm, ok)


@several
def test_gradients_do_not_meet_later_messages(comm):
    """A schedule in which the second forward pass overtakes the first backward."""
    ok = True
    if comm.rank == 0:
        xs = [chainer.Variable(np.full(2, 1.0 + i)) for i in range(2)]
        first = functions.recv(comm, 1, functions.send(xs[0], comm, 1))
        delegate = functions.send(xs[1], comm, 1)
        F.sum(first).backward()
        F.sum(functions.recv(comm, 1, delegate)).backward()
        ok = (xs[0].grad == 3).all() and (xs[1].grad == 3).all()
    if comm.rank == 1:
        delegates = [
            functions.send(3 * functions.recv(comm, 0), comm, 0) for _ in range(2)
        ]
        for delegate in delegates:
            delegate.backward()
    assert_all_ranks(comm, ok)


@several
def test_gradients_of_another_message_are_refused(comm):
    """Backward passes in another order, of arrays of one shape: an error, no swap."""
    ok = True
    if comm.rank == 0:
        xs = [chainer.Variable(np.ones(2)) for _ in range(2)]
        delegates = [functions.send(x, comm, 1) for x in xs]
        error = raised_by(delegates[0].backward)
        ok = isinstance(error, MismatchError) and "message" in str(error)
        comm.recv(1, 8000)
    if comm.rank == 1:
        ys = [functions.recv(comm, 0) for _ in range(2)]
        for y in reversed(ys):
            F.sum(y).backward()
    assert_all_ranks(comm, ok)


@several
def test_a_backward_pass_that_never_comes_ends_in_time():
    with chainermn_ng.create_communicator("flat", timeout_s=1) as comm:
        ok, text = True, ""
        if comm.rank == 0:
            delegate = functions.send(np.ones(2), comm, 1, tag=3)
            error = raised_by(delegate.backward)
            text = str(error)
            ok = isinstance(error, CommunicationTimeoutError) and all(
                words in text
                for words in (
                    "backward pass of functions.send to rank 1 (tag 3)",
                    "functions.recv",
                    "pseudo_connect",
                )
            )
        if comm.rank == 1:
            functions.recv(comm, 0, tag=3)
        assert_all_ranks(comm, ok, text)


@several
def test_bad_arguments(comm):
    peer = (comm.rank + 1) % comm.size
    x = np.ones(2)
    for function, error_type in (
        (lambda: functions.send(x, comm, comm.rank), ValueError),
        (lambda: functions.recv(comm, comm.rank), ValueError),
        (lambda: functions.send(x, comm, comm.size), ValueError),
        (lambda: functions.recv(comm, -1), ValueError),
        (lambda: functions.send(x, comm, peer, tag=8000), ValueError),
        (lambda: functions.send(x, comm, "1"), TypeError),
        (lambda: functions.send([], comm, peer), ValueError),
        (lambda: functions.send("text", comm, peer), TypeError),
        (lambda: functions.send(None, comm, peer), TypeError),
        (lambda: functions.send(x, comm.mpi_comm, peer), TypeError),
    ):
        error = raised_by(function)
        ok = isinstance(error, error_type) and "functions." in str(error)
        assert_all_ranks(comm, ok, repr(error))
