"""Recurrent networks cut in the direction of time."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.errors import raised_by
from helpers.ranks import assert_all_ranks

from chainermn_ng import functions
from chainermn_ng.links import create_multi_node_n_step_rnn

several = pytest.mark.parallel([2, 3])
KINDS = [
    direction + kind
    for direction in ("NStep", "NStepBi")
    for kind in ("LSTM", "GRU", "RNNTanh", "RNNReLU")
]


def network(kind, seed):
    """Return a network of 2 layers, from 3 to 4 values; seeded."""
    link = getattr(L, kind)(2, 3, 4, 0.0)
    random = np.random.RandomState(seed)
    for _, param in sorted(link.namedparams()):
        param.array[...] = random.normal(scale=0.5, size=param.shape)
    return link


def sequences(rank):
    random = np.random.RandomState(100 + rank)
    return [random.normal(size=(length, 3)).astype("f") for length in (3, 1, 2)]


def loss_of(outputs, rank):
    """Use all outputs of the last network, and those of each step everywhere."""
    return (rank + 1.0) * sum(F.sum(y * y) for y in outputs[-1])


@several
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_pass_from_rank_to_rank(comm, kind):
    rank, last = comm.rank, comm.size - 1
    link = create_multi_node_n_step_rnn(
        network(kind, rank),
        comm,
        rank_in=None if rank == 0 else rank - 1,
        rank_out=None if rank == last else rank + 1,
    )
    *outputs, delegate = link(sequences(rank))
    loss = loss_of(outputs, rank)
    if rank < last:
        (loss,) = functions.pseudo_connect(delegate, loss)
    link.cleargrads()
    loss.backward()

    links = [network(kind, r) for r in range(comm.size)]
    states, total = [None] * links[0].n_cells, 0.0
    for r, joined in enumerate(links):
        expected = joined(*states, sequences(r))
        states = expected[:-1]
        total += loss_of(expected, r)
        if r == rank:
            mine = expected
    for joined in links:
        joined.cleargrads()
    total.backward()
    ok = (delegate is None) == (rank == last) and len(outputs) == len(mine)
    for a, b in zip(outputs[:-1], mine[:-1], strict=True):
        ok = ok and np.allclose(a.array, b.array, atol=1e-5)
    grads = dict(links[rank].namedparams())
    for name, param in link.actual_rnn.namedparams():
        ok = ok and np.allclose(param.grad, grads[name].grad, rtol=1e-3, atol=1e-4)
    assert_all_ranks(comm, ok, kind)


@several
@pytest.mark.parametrize("kind", ["NStepLSTM", "NStepBiLSTM", "NStepGRU"])
def test_a_loss_on_the_last_rank_alone(comm, kind):
    """As of an encoder and a decoder: the others start from their delegates.

    The gradients of an LSTM's two states must then not be mixed up.
    """
    rank, last = comm.rank, comm.size - 1
    link = create_multi_node_n_step_rnn(
        network(kind, rank),
        comm,
        rank_in=None if rank == 0 else rank - 1,
        rank_out=None if rank == last else rank + 1,
    )
    *outputs, delegate = link(sequences(rank))
    link.cleargrads()
    (loss_of(outputs, rank) if rank == last else delegate).backward()

    links = [network(kind, r) for r in range(comm.size)]
    states = [None] * links[0].n_cells
    for r, joined in enumerate(links):
        joined.cleargrads()
        *states, ys = joined(*states, sequences(r))
    loss_of([ys], last).backward()
    grads = dict(links[rank].namedparams())
    ok = all(
        np.allclose(param.grad, grads[name].grad, rtol=1e-3, atol=1e-4)
        for name, param in link.actual_rnn.namedparams()
    )
    assert_all_ranks(comm, ok, kind)


@several
def test_copies_and_what_it_refuses(comm):
    link = create_multi_node_n_step_rnn(network("NStepGRU", 0), comm)
    twin = link.copy("copy")
    ok = (twin.n_cells, twin.rank_in, twin.rank_out) == (1, None, None)
    xs = sequences(0)
    ok = ok and np.array_equal(twin(xs)[0].array, link(xs)[0].array)
    error = raised_by(lambda: create_multi_node_n_step_rnn(L.Linear(2, 2), comm))
    ok = ok and isinstance(error, ValueError) and "Linear" in str(error)
    assert_all_ranks(comm, ok, repr(error))
    assert all(name.startswith("/actual_rnn/") for name, _ in link.namedparams())
    assert isinstance(link, chainer.Chain)
