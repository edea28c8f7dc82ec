"""n ranks take the steps of one process on all their batches together."""

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks
from helpers.chainer_models import (
    MLP,
    are_close,
    batches,
    part,
    same_on_all_ranks,
    weights,
)
from helpers.ranks import assert_all_ranks

import communicators
from chainermn_ng.communicators import create_communicator
from chainermn_ng.optimizers import create_multi_node_optimizer

N_STEPS = 4
OPTIMIZERS = {
    "SGD": lambda: chainer.optimizers.SGD(0.3),
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.1),
    "Adam": lambda: chainer.optimizers.Adam(0.02),
}
REAL = [n for n in communicators.available_communicators() if n != "dummy"]


def train_alone(optimizer, model, data):
    optimizer.setup(model)
    for batch in data:
        optimizer.update(model, *batch)
    return weights(model)


def check(comm, kind):
    data = batches(N_STEPS, 12)
    expected = train_alone(OPTIMIZERS[kind](), MLP(seed=0), data)
    model = MLP(seed=comm.rank)
    optimizer = create_multi_node_optimizer(OPTIMIZERS[kind](), comm).setup(model)
    for batch in data:
        optimizer.update(model, *part(comm, batch))
    assert_all_ranks(comm, same_on_all_ranks(comm, model), "ranks drifted apart")
    ok = are_close(weights(model), expected) and optimizer.t == N_STEPS
    assert_all_ranks(comm, ok, f"t={optimizer.t}")


@pytest.mark.reports("chainer/chainermn#195", "chainer/chainermn#148")
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("name", REAL)
def test_each_communicator(name, kind):
    with create_communicator(name, timeout_s=30) as comm:
        check(comm, kind)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("topology", ["2x2", "4x1", "1x4", "3+1"])
@pytest.mark.parametrize("name", REAL)
def test_pretended_topologies(name, topology):
    try:
        comm = create_communicator(name, topology=topology, timeout_s=30)
    except communicators.TopologyError as error:
        pytest.skip(f"{name} does not work on {topology}: {error}")
    with comm:
        check(comm, "MomentumSGD")


@pytest.mark.parallel([1, 2, 3])
def test_the_dummy_communicator_takes_local_steps(comm):
    with create_communicator("dummy") as dummy:
        batch = part(comm, batches(1, 12)[0])
        expected = train_alone(OPTIMIZERS["SGD"](), MLP(0), [batch])
        model = MLP(0)
        optimizer = create_multi_node_optimizer(OPTIMIZERS["SGD"](), dummy)
        optimizer.setup(model).update(model, *batch)
        ok = weights(model).keys() == expected.keys()
        assert_all_ranks(comm, ok)


@pytest.mark.reports("horovod/horovod#1346", "mindspore-lab/mindcv#603")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "hook",
    [optimizer_hooks.GradientClipping(0.05), optimizer_hooks.WeightDecay(0.1)],
    ids=lambda hook: hook.name,
)
def test_hooks_see_the_average(comm, hook):
    data = batches(2, 12)
    alone = chainer.optimizers.SGD(0.5).setup(MLP(0))
    alone.add_hook(hook)
    together = create_multi_node_optimizer(chainer.optimizers.SGD(0.5), comm)
    together.setup(MLP(0))
    together.add_hook(hook)
    for batch in data:
        alone.update(alone.target, *batch)
        together.update(together.target, *part(comm, batch))
    ok = are_close(weights(together.target), weights(alone.target))
    assert_all_ranks(comm, ok)


@pytest.mark.reports("horovod/horovod#546", "wkentaro/chainer-mask-rcnn#5")
@pytest.mark.parallel([2, 3])
def test_several_backward_passes_make_one_step_and_one_reduction(comm, monkeypatch):
    labels = []
    reduce = comm.engine.allreduce_arrays

    def count(*args, label, **kwargs):
        labels.append(label)
        return reduce(*args, label=label, **kwargs)

    monkeypatch.setattr(comm.engine, "allreduce_arrays", count)
    batch = batches(1, 4 * comm.size)[0]
    expected = train_alone(OPTIMIZERS["SGD"](), MLP(0), [batch])
    model = MLP(0)
    optimizer = create_multi_node_optimizer(OPTIMIZERS["SGD"](), comm).setup(model)
    comm.bcast_data(model)
    x, t = part(comm, batch)
    model.cleargrads()
    for half in (slice(0, 2), slice(2, 4)):
        (model(x[half], t[half]) / 2).backward()
    optimizer.update()
    ok = are_close(weights(model), expected) and optimizer.t == len(labels) == 1
    assert_all_ranks(comm, ok, f"{labels}")


@pytest.mark.reports(
    "pytorch/pytorch#67253", "pytorch/pytorch#37359", "huggingface/transformers#608"
)
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("has_loss_function", [True, False])
def test_uneven_batches_weighted_by_samples(comm, has_loss_function):
    sizes = [6, 2, 1][: comm.size]
    ends = np.cumsum(sizes)
    mine = slice(ends[comm.rank] - sizes[comm.rank], ends[comm.rank])
    data = batches(3, int(ends[-1]))
    expected = train_alone(OPTIMIZERS["SGD"](), MLP(0), data)
    model = MLP(0)
    optimizer = create_multi_node_optimizer(
        OPTIMIZERS["SGD"](), comm, count_samples=lambda x, t: len(x)
    ).setup(model)
    for x, t in data:
        if has_loss_function:
            optimizer.update(model, x[mine], t[mine])
        else:
            model.cleargrads()
            model(x[mine], t[mine]).backward()
            optimizer.update(None, x[mine], t[mine])
    ok = are_close(weights(model), expected, atol=1e-6)
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, model))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("batch_statistics", [False, True])
def test_lazily_sized_layers(comm, batch_statistics):
    """Rank 0 draws what one process draws; the others draw something else."""

    def build():
        np.random.seed(3)
        layers = [chainer.links.Linear(None, 6), chainer.functions.tanh]
        if batch_statistics:
            layers.append(chainer.links.BatchNormalization(axis=0))
        return chainer.Sequential(*layers, chainer.links.Linear(None, 3))

    def loss(model):
        return lambda x, t: chainer.functions.softmax_cross_entropy(model(x), t)

    # The same batch on each rank, as batch statistics are those of one rank.
    x, t = batches(1, 4)[0]
    alone = chainer.optimizers.SGD(0.3).setup(build())
    for _ in range(3):
        alone.update(loss(alone.target), x, t)
    together = create_multi_node_optimizer(chainer.optimizers.SGD(0.3), comm)
    together.setup(build())
    if comm.rank:
        np.random.seed(comm.rank)
    for _ in range(3):
        together.update(loss(together.target), x, t)
    assert_all_ranks(comm, same_on_all_ranks(comm, together.target))
    if batch_statistics:
        mean = together.target[2].avg_mean
        close = np.allclose(mean, alone.target[2].avg_mean, atol=1e-5)
        assert_all_ranks(comm, close, f"{mean} {alone.target[2].avg_mean}")
    ok = are_close(weights(together.target), weights(alone.target))
    assert_all_ranks(comm, ok)
