"""Models cut over ranks train as they do in one process."""

import copy

import chainer
import chainer.functions as F
import numpy as np
import pytest
from helpers.chainer_models import are_close, same_on_all_ranks, weights
from helpers.errors import assert_all_raise, raised_by
from helpers.model_parallel import (
    BranchModel,
    ChainModel,
    JoinedModel,
    digits,
    loss_function,
    parts_of_branches,
    parts_of_chain,
)
from helpers.ranks import assert_all_ranks

import chainermn_ng
from chainermn_ng import MultiNodeChainList, functions

several = pytest.mark.parallel([2, 3])
N_STEPS = 4


class Returns(chainer.Link):
    """Calls a function, and notes its arguments."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def model_of(comm, *links):
    """Return a model from ``(function, rank_in, rank_out)``."""
    model = MultiNodeChainList(comm)
    for function, rank_in, rank_out in links:
        model.add_link(Returns(function), rank_in, rank_out)
    return model


def train_joined(parts, has_branches, data):
    model = JoinedModel(parts, has_branches)
    optimizer = make_optimizer().setup(model)
    for batch in data:
        optimizer.update(loss_function(model, True), *batch)
    return model


def make_optimizer():
    return chainer.optimizers.MomentumSGD(0.2, 0.5)


@several
@pytest.mark.parametrize("has_branches", [False, True])
def test_training_equals_one_process(comm, has_branches):
    model = (BranchModel if has_branches else ChainModel)(comm)
    parts = (parts_of_branches if has_branches else parts_of_chain)(comm.size)
    mine, root = [comm.rank], comm.size - 1
    if has_branches:
        root = 0
        mine = [0, len(parts) - 1] if comm.rank == 0 else mine
    before = weights(model)
    data = [digits(8, seed) for seed in range(N_STEPS)]
    optimizer = make_optimizer().setup(model)
    for batch in data:
        optimizer.update(loss_function(model, comm.rank == root), *batch)
    joined = train_joined(parts, has_branches, data)
    ok = all(
        are_close(weights(model[i]), weights(joined[part]))
        for i, part in enumerate(mine)
    )
    assert_all_ranks(comm, ok, f"{weights(model)}")
    assert_all_ranks(comm, not are_close(weights(model), before))


@pytest.mark.parallel([1, 2])
def test_a_rank_sends_to_itself(comm):
    model = MultiNodeChainList(comm)
    for part, rank_in, rank_out in zip(
        parts_of_chain(2), (None, comm.rank), (comm.rank, None), strict=True
    ):
        model.add_link(part, rank_in, rank_out)
    data = [digits(8, seed) for seed in range(N_STEPS)]
    optimizer = make_optimizer().setup(model)
    for batch in data:
        optimizer.update(loss_function(model, True), *batch)
    joined = train_joined(parts_of_chain(2), False, data)
    assert_all_ranks(comm, are_close(weights(model), weights(joined)))


@pytest.mark.parallel(4)
def test_groups_of_ranks_hold_a_model_each_and_average(comm):
    """Data parallel over the groups, model parallel within them."""
    within = comm.split(comm.rank // 2, comm.rank)
    across = comm.split(comm.rank % 2, comm.rank)
    model = ChainModel(within)
    data = [digits(8, seed) for seed in range(N_STEPS)]
    optimizer = chainermn_ng.create_multi_node_optimizer(
        make_optimizer(), across
    ).setup(model)
    half = slice(4 * across.rank, 4 * across.rank + 4)
    for x, t in data:
        optimizer.update(loss_function(model, within.rank == 1), x[half], t[half])
    joined = train_joined(parts_of_chain(2), False, data)
    ok = are_close(weights(model[0]), weights(joined[within.rank]))
    assert_all_ranks(comm, ok and same_on_all_ranks(across, model))
    across.finalize()
    within.finalize()


@several
def test_long_messages_that_cross(comm):
    """Each rank sends before it receives, more than MPI takes without a receiver."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = chainer.Variable(np.full(300_000, comm.rank + 1.0, "f"))
    model = model_of(
        comm, (lambda x: 2 * x, None, right), (lambda y: 3 * y, left, None)
    )
    y = model(x)
    y.grad = np.full_like(y.array, comm.rank + 1)
    y.backward()
    ok = (y.array == 6 * (left + 1)).all() and (x.grad == 6 * (right + 1)).all()
    assert_all_ranks(comm, ok, f"{y.array[:2]} {x.grad[:2]}")


@several
def test_tuples_several_inputs_and_inputs_that_are_not_used(comm):
    x = chainer.Variable(np.ones(2, "f"))
    z = chainer.Variable(np.full(3, 2.0, "f"))
    if comm.rank == 0:
        # A second link takes the model's inputs too, all of them.
        model = model_of(
            comm,
            (lambda x, z: (x * 2, z * 3), None, 1),
            (lambda x, z: x + F.sum(z), None, 1),
        )
        model(x, z).backward()
        ok = (x.grad == 5).all() and (z.grad == 6).all()
    elif comm.rank == 1:
        # The sum goes nowhere: its gradient is zero, and rank 0 does not wait.
        model = model_of(
            comm,
            (lambda pair: pair, 0, 1),
            (lambda pair, y: (pair[0], pair[1], y), [1, 0], None),
        )
        a, b, c = model()
        (F.sum(a) * 2.5 + F.sum(b)).backward()
        ok = c.shape == (2,) and (a.array == 2).all() and (b.array == 6).all()
        x.grad = np.full(2, 5.0, "f")
    else:
        model = model_of(comm)
        delegate = model()
        delegate.backward()
        ok = delegate.shape == (0,)
    z_ok = comm.rank != 0 or (z.grad == 3).all()
    x_ok = comm.rank != 0 or (x.grad == 5).all()
    assert_all_ranks(
        comm, (ok or comm.rank == 0) and z_ok and x_ok, f"{x.grad} {z.grad}"
    )


@several
def test_inference_keeps_no_graph(comm):
    model = ChainModel(comm)
    x, _ = digits(4)
    with chainer.no_backprop_mode(), chainer.using_config("train", False):
        y = model(x)
    joined = JoinedModel(parts_of_chain(comm.size), False)(x)
    ok = y.creator_node is None
    if comm.rank == comm.size - 1:
        ok = ok and np.allclose(y.array, joined.array, atol=1e-6)
    assert_all_ranks(comm, ok)


@several
def test_bad_graphs_are_shown_on_all_ranks_before_anything_is_sent(comm):
    last = comm.size - 1

    def fail(*args):
        raise AssertionError("a link has run")

    unmatched = [
        [(fail, None, last)] if rank == 0 else [(fail, None, None)]
        for rank in range(comm.size)
    ]
    cycle = [
        [(fail, (rank - 1) % comm.size, (rank + 1) % comm.size)]
        for rank in range(comm.size)
    ]
    for table, text in (
        (unmatched, f"rank 0 sends to rank {last} once"),
        (cycle, "a cycle: "),
    ):
        model = model_of(comm, *table[comm.rank])
        for call in (model, model.check_graph):
            assert_all_raise(
                comm,
                call,
                ValueError,
                text,
                "link 0 of rank 0 (Returns)",
                f"link 0 of rank {last} (Returns)",
            )


@several
def test_bad_ranks_and_second_outputs(comm):
    model = MultiNodeChainList(comm)
    link = chainer.Link()
    for arguments, error_type in (
        ({"rank_in": comm.size}, ValueError),
        ({"rank_out": -1}, ValueError),
        ({"rank_in": []}, ValueError),
        ({"rank_in": 0.5}, TypeError),
        ({"rank_out": "1"}, TypeError),
    ):
        error = raised_by(lambda kw=arguments: model.add_link(link, **kw))
        ok = isinstance(error, error_type) and "rank_" in str(error)
        assert_all_ranks(comm, ok and len(model) == 0, repr(error))
    model.add_link(link)
    error = raised_by(lambda: model.add_link(link))
    assert_all_ranks(comm, isinstance(error, ValueError), repr(error))
    if comm.rank == 0:
        model.append(chainer.Link())
    assert_all_raise(comm, model.check_graph, ValueError, "rank 0", "add_link")


@several
def test_copies_files_and_devices(comm, tmp_path):
    model = ChainModel(comm)
    x, _ = digits(4)
    expected = model(x).array
    names = [name for name, _ in model.namedparams()]
    assert names == ["/0/linear/W", "/0/linear/b"]

    for twin in (copy.deepcopy(model), model.copy(), model.copy("copy")):
        ok = np.array_equal(twin(x).array, expected)
        assert_all_ranks(comm, ok and twin._comm is model._comm)
    fresh = model.copy("init")
    chainer.serializers.save_npz(tmp_path / "model.npz", model)
    chainer.serializers.load_npz(tmp_path / "model.npz", fresh)
    ok = np.array_equal(fresh(x).array, expected)
    fresh.to_device("@numpy")
    ok = ok and np.array_equal(fresh(x).array, expected)
    assert_all_ranks(comm, ok)
    # A link that one copy gets is not one of the others'.
    fresh.add_link(Returns(F.relu), comm.rank, comm.rank)
    assert_all_ranks(comm, len(model) == 1 and np.array_equal(model(x).array, expected))


@pytest.mark.parallel(2)
def test_the_other_rank_may_be_written_by_hand(comm):
    x = chainer.Variable(np.array([1.0, 2.0]))
    if comm.rank == 0:
        model = MultiNodeChainList(comm, check_graph=False)
        model.add_link(Returns(lambda x: 2 * x), None, 1)
        model.add_link(Returns(lambda y: y * y), 1, None)
        F.sum(model(x)).backward()
        ok = np.allclose(x.grad, 2 * 6 * 6 * x.array)
    else:
        functions.send(3 * functions.recv(comm, 0), comm, 0).backward()
        ok = True
    assert_all_ranks(comm, ok, f"{x.grad}")
