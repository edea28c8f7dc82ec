import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.ranks import assert_all_ranks

import chainermn_ng

RNNS = [L.NStepLSTM, L.NStepGRU, L.NStepBiLSTM]


def sequences(n_steps):
    draw = np.random.RandomState(7)
    return [draw.normal(size=(n, 3)).astype("f") for n in (n_steps, n_steps, n_steps)]


def gradients(rnn):
    return {name: param.grad for name, param in rnn.namedparams()}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("rnn_class", RNNS, ids=lambda cls: cls.__name__)
def test_a_network_cut_in_time_equals_one_process(comm, rnn_class, only_last):
    """With losses on all ranks, and as in an encoder and decoder on the last alone."""

    # Both directions of a bidirectional one go through each part by itself.
    def part(rank):
        return [xs[2 * rank : 2 * rank + 2] for xs in sequences(2 * comm.size)]

    def loss_of(ys):
        return F.sum(F.concat(ys, axis=0) ** 2)

    with chainermn_ng.shared_seed(3):
        whole, mine = (rnn_class(1, 3, 4, 0.0) for _ in range(2))
    mine.copyparams(whole)
    states = [None] * whole.n_cells
    total = 0
    for rank in range(comm.size):
        *states, ys = whole(*states, part(rank))
        if rank == comm.size - 1 or not only_last:
            total += loss_of(ys)
    whole.cleargrads()
    total.backward()

    is_last = comm.rank == comm.size - 1
    rnn = chainermn_ng.links.create_multi_node_n_step_rnn(
        mine,
        comm,
        rank_in=comm.rank - 1 if comm.rank > 0 else None,
        rank_out=None if is_last else comm.rank + 1,
    )
    *_, ys, delegate = rnn(part(comm.rank))
    loss = loss_of(ys)
    if only_last and not is_last:
        loss = delegate
    elif not is_last:
        (loss,) = chainermn_ng.functions.pseudo_connect(delegate, loss)
    mine.cleargrads()
    loss.backward()
    ok = True
    for name, expected in gradients(whole).items():
        added = comm.allreduce(gradients(mine)[name])
        ok = ok and np.allclose(added, expected, rtol=1e-4, atol=1e-5)
    assert_all_ranks(comm, ok)


@pytest.mark.parallel(2)
def test_only_recurrent_links_are_taken(comm):
    with pytest.raises(ValueError, match="got Linear"):
        chainermn_ng.links.create_multi_node_n_step_rnn(L.Linear(2, 2), comm)
