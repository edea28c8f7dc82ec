"""Making model and optimizer the same on all ranks, and finding out where not."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.training import StandardUpdater, Trainer
from chainer.training import extensions as chainer_extensions
from helpers.chainer_models import MLP, batches, part, same_on_all_ranks
from helpers.errors import assert_all_raise, raised_by
from helpers.ranks import assert_all_ranks
from helpers.snapshots import load, saved

import chainermn_ng
from chainermn_ng.extensions import AllreducePersistent, CheckState
from chainermn_ng.optimizers import create_multi_node_optimizer
from communicators import MismatchError


def trained(steps=3):
    """Return the snapshots of a model and its optimizer, and the latter itself."""
    optimizer = chainer.optimizers.MomentumSGD(0.05, 0.8).setup(MLP(0))
    for batch in batches(steps, 6):
        optimizer.update(optimizer.target, *batch)
    return saved(optimizer.target), saved(optimizer), optimizer


def new_optimizer(comm, kind, seed=4, double_buffering=False):
    optimizer = chainer.optimizers.MomentumSGD(0.01)
    if kind == "multi-node":
        optimizer = create_multi_node_optimizer(optimizer, comm, double_buffering)
    return optimizer.setup(MLP(seed))


@pytest.mark.parallel([2, 3])
@pytest.mark.reports(
    "horovod/horovod#526", "horovod/horovod#936", "horovod/horovod#1774"
)
@pytest.mark.parametrize("kind", ["multi-node", "plain"])
@pytest.mark.parametrize("root", [0, 1])
def test_one_rank_alone_loads_a_snapshot(comm, kind, root):
    """Weights, momentum, step count and hyperparameters go on as in one process."""
    *snapshots, expected = trained()
    optimizer = new_optimizer(comm, kind, seed=comm.rank)
    if comm.rank == root:
        load(snapshots[0], optimizer.target)
        load(snapshots[1], optimizer)
        optimizer.lr, optimizer.momentum = 0.05, 0.8
    chainermn_ng.bcast_state(optimizer, root, None if kind == "multi-node" else comm)
    for batch in batches(3, 6, seed=9):
        expected.update(expected.target, *batch)
        optimizer.update(
            optimizer.target, *(part(comm, batch) if kind == "multi-node" else batch)
        )
    pairs = zip(expected.target.params(), optimizer.target.params(), strict=True)
    ok = all(np.allclose(a.array, b.array, atol=1e-5) for a, b in pairs)
    ok = ok and (optimizer.t, optimizer.lr, optimizer.momentum) == (6, 0.05, 0.8)
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, optimizer.target))
    chainermn_ng.check_state(optimizer, None if kind == "multi-node" else comm)


def change_weight(optimizer):
    optimizer.target.l1.W.array[0, 0] += 1e-6


def change_lr(optimizer):
    optimizer.lr = 0.0125


def change_momentum(optimizer):
    optimizer.target.l2.b.update_rule.state["v"][0] = 3


def change_step_count(optimizer):
    optimizer.t += 1


def change_own_lr(optimizer):
    optimizer.target.l1.b.update_rule.hyperparam.lr = 0.5


def freeze(optimizer):
    optimizer.target.l2.W.update_rule.enabled = False


def add_hook(optimizer):
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))


def add_attribute(optimizer):
    optimizer.target.add_persistent("counter", 3)


CHANGES = {
    "parameter /l1/W: float32 (7, 5) with digest": change_weight,
    "hyperparameter lr: ": change_lr,
    "optimizer state v of /l2/b": change_momentum,
    "step count: ": change_step_count,
    "hyperparameter lr of /l1/b: ": change_own_lr,
    "update of /l2/W: ": freeze,
    "hooks: ": add_hook,
    "persistent value /counter: ": add_attribute,
}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("kind", ["multi-node", "plain"])
def test_the_check_names_what_differs_and_where(comm, name, kind):
    optimizer = new_optimizer(comm, kind)
    batch = part(comm, batches(1, 6)[0]) if kind == "multi-node" else batches(1, 6)[0]
    for _ in range(2):
        optimizer.update(optimizer.target, *batch)
    given = None if kind == "multi-node" else comm
    chainermn_ng.check_state(optimizer, given)
    changed = comm.size - 1
    if comm.rank == changed:
        CHANGES[name](optimizer)
    check = lambda: chainermn_ng.check_state(optimizer, given)  # noqa: E731
    others = "rank 0" if comm.size == 2 else "ranks 0, 1"
    assert_all_raise(
        comm, check, MismatchError, "not in step", name, f"rank {changed}", others
    )
    if "persistent" in name or "hooks" in name:
        return
    chainermn_ng.bcast_state(optimizer, 0, given)
    check()


@pytest.mark.parallel([2, 3])
def test_many_differences_are_counted(comm):
    optimizer = new_optimizer(comm, "plain", seed=comm.rank)
    check = lambda: chainermn_ng.check_state(optimizer, comm)  # noqa: E731
    text = str(raised_by(check))
    assert_all_ranks(comm, "/l1/W" in text and "/l2/W" in text, text)
    optimizer.target.l1.W.update_rule.hyperparam.lr = 1.0 + comm.rank
    for p in optimizer.target.params():
        p.array[...] = comm.rank + 1
        p.update_rule.hyperparam.momentum = comm.rank
    assert_all_raise(comm, check, MismatchError, "and 4 more")


@pytest.mark.parallel([2, 3])
def test_gradients_in_flight(comm):
    """Are the same on all ranks, and no reason to complain."""
    optimizer = new_optimizer(comm, "multi-node", double_buffering=True)
    for batch in batches(2, 6):
        optimizer.update(optimizer.target, *part(comm, batch))
        chainermn_ng.check_state(optimizer)
    optimizer.flush()


@pytest.mark.parallel([1, 2, 3])
def test_bad_arguments(comm):
    plain = chainer.optimizers.SGD()
    wrapped = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    for function in (chainermn_ng.bcast_state, chainermn_ng.check_state):
        with pytest.raises(TypeError, match="expected an optimizer"):
            function(MLP(), comm=comm)
        with pytest.raises(TypeError, match="give comm="):
            function(plain)
        with pytest.raises(TypeError, match="expected a communicator"):
            function(plain, comm="flat")
        assert_all_raise(
            comm, lambda f=function: f(plain, comm=comm), ValueError, "setup"
        )
    assert_all_raise(
        comm, lambda: chainermn_ng.check_state(wrapped), ValueError, "setup"
    )
    plain.setup(MLP())
    if comm.size > 1:
        root = lambda: chainermn_ng.bcast_state(plain, 9, comm)  # noqa: E731
        assert_all_raise(comm, root, ValueError, "root 9")
        persistents = comm.rank == 0
        check = lambda: chainermn_ng.check_state(  # noqa: E731
            plain, comm, persistents=persistents
        )
        assert_all_raise(comm, check, MismatchError, "persistents=True on rank 0")


class Normalized(chainer.Chain):
    """Its running statistics are those of each rank's batches."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.bn = L.BatchNormalization(2)

    def forward(self, x):
        return chainer.functions.sum(self.bn(x) ** 3)


def trainer_of(comm, optimizer, out, n_epochs=2):
    data = np.random.RandomState(comm.rank).normal(size=(4, 2)).astype("f")
    iterator = chainer.iterators.SerialIterator(data, 2, shuffle=False)
    updater = StandardUpdater(iterator, optimizer)
    return Trainer(updater, (n_epochs, "epoch"), out=str(out))


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainermn#73")
@pytest.mark.parametrize("kind", ["multi-node", "plain"])
def test_a_shift_of_the_learning_rate_on_one_rank(comm, tmp_path, kind):
    """The check finds it at the end of the epoch; before, that the rest is in step."""
    optimizer = chainer.optimizers.SGD(0.1)
    if kind == "multi-node":
        optimizer = create_multi_node_optimizer(optimizer, comm)
    # Of the plain one the gradients differ; its weights must not.
    optimizer.setup(
        Normalized() if kind == "multi-node" else chainer.Sequential(Zero())
    )
    trainer = trainer_of(comm, optimizer, tmp_path)
    given = None if kind == "multi-node" else comm
    trainer.extend(CheckState(given, persistents=False))
    epochs = []
    trainer.extend(
        lambda t: epochs.append(t.updater.epoch), name="e", trigger=(1, "epoch")
    )
    if comm.rank == 0:
        trainer.extend(
            chainer_extensions.ExponentialShift("lr", 0.5), trigger=(1, "epoch")
        )
    texts = (
        ["lr"]
        if kind == "multi-node"
        else ["hyperparameter lr: 0.05 on rank 0, 0.1 on"]
    )
    run = lambda: trainer.run(show_loop_exception_msg=False)  # noqa: E731
    assert_all_raise(comm, run, MismatchError, *texts)
    assert_all_ranks(comm, epochs == [1], f"{epochs}")


class Zero(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(1.0, (2,))

    def forward(self, x):
        return chainer.functions.sum(self.w * 0)


@pytest.mark.parallel([2, 3])
def test_running_statistics_of_each_rank(comm, tmp_path):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(Normalized())
    trainer = trainer_of(comm, optimizer, tmp_path)
    trainer.extend(CheckState())
    run = lambda: trainer.run(show_loop_exception_msg=False)  # noqa: E731
    assert_all_raise(comm, run, MismatchError, "/bn/avg_mean", "AllreducePersistent")
    trainer = trainer_of(comm, optimizer, tmp_path)
    trainer.extend(CheckState())
    trainer.extend(AllreducePersistent(optimizer.target, comm))
    trainer.run()
    assert_all_ranks(comm, trainer.updater.epoch == 2)
