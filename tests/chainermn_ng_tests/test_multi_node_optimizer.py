import copy
import pickle
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.chainer_models import (
    MLP,
    are_close,
    batches,
    part,
    same_on_all_ranks,
    weights,
)
from helpers.errors import assert_all_raise, raised_by
from helpers.ranks import assert_all_ranks
from helpers.snapshots import load, saved

from chainermn_ng.communicators import create_communicator
from chainermn_ng.optimizers import (
    MultiNodeOptimizer,
    count_first_argument,
    create_multi_node_optimizer,
)
from communicators import CommunicatorError, MismatchError


def multi_node_sgd(comm, model, lr=0.1):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr), comm)
    return optimizer.setup(model)


@pytest.mark.reports("chainer/chainermn#275")
@pytest.mark.parallel([1, 2, 3])
def test_setup_returns_the_wrapper(comm):
    model = MLP(comm.rank)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    assert optimizer.setup(model) is optimizer
    assert isinstance(optimizer, MultiNodeOptimizer)
    optimizer.update(model, *batches(1, 4, seed=comm.rank)[0])
    assert_all_ranks(comm, same_on_all_ranks(comm, model))


@pytest.mark.parallel([1, 2])
def test_attributes_are_those_of_the_wrapped_optimizer(comm):
    actual = chainer.optimizers.SGD(0.1)
    optimizer = create_multi_node_optimizer(actual, comm).setup(MLP())
    optimizer.lr = 0.25
    assert actual.lr == 0.25
    assert optimizer.hyperparam is actual.hyperparam
    optimizer.note = "mine"
    assert actual.note == "mine"
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_attribute
    optimizer.use_auto_new_epoch = True
    optimizer.new_epoch(auto=True)
    assert actual.epoch == 1


@pytest.mark.parallel([1, 2])
def test_bad_arguments(comm):
    sgd = chainer.optimizers.SGD(0.1)
    with pytest.raises(TypeError, match="made by chainermn_ng"):
        create_multi_node_optimizer(sgd, comm.engine)
    with pytest.raises(TypeError, match="count_samples"):
        count_first_argument(3)
    assert count_first_argument(3, x=np.zeros((4, 2))) == 4


@pytest.mark.reports("chainer/chainermn#225", "chainer/chainermn#144")
@pytest.mark.parallel([2, 3])
def test_resume_equals_the_run_without_a_break(comm):
    data = batches(6, 12)

    def new(seed):
        optimizer = chainer.optimizers.MomentumSGD(0.1)
        return create_multi_node_optimizer(optimizer, comm).setup(MLP(seed))

    def run(optimizer, steps):
        for batch in steps:
            optimizer.update(optimizer.target, *part(comm, batch))

    whole = new(0)
    run(whole, data)
    first = new(0)
    run(first, data[:3])
    snapshots = saved(first.target), saved(first)
    second = new(7)
    run(second, data[:1])
    load(snapshots[0], second.target)
    load(snapshots[1], second)
    run(second, data[3:])
    expected, found = weights(whole.target), weights(second.target)
    ok = second.t == 6 and all((expected[k] == found[k]).all() for k in expected)
    assert_all_ranks(comm, bool(ok), f"t={second.t}")


@pytest.mark.parallel([1, 2])
def test_a_snapshot_from_before_the_first_step(comm):
    """There is no momentum yet; one that is there is forgotten."""
    batch = part(comm, batches(1, 12)[0])
    models = [MLP(0), MLP(0)]
    optimizers = [
        create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm)
        for _ in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.setup(model)
    snapshots = saved(models[0]), saved(optimizers[0])
    optimizers[1].update(models[1], *batch)
    for _ in range(2):
        load(snapshots[0], models[1])
        load(snapshots[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(2):
            optimizer.update(model, *batch)
    expected, found = map(weights, models)
    ok = optimizers[1].t == 2 and all((expected[k] == found[k]).all() for k in found)
    assert_all_ranks(comm, ok)


@pytest.mark.reports(
    "horovod/horovod#526", "horovod/horovod#936", "horovod/horovod#1774"
)
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_one_rank_alone_loads_a_snapshot(comm, when):
    data = batches(3, 12)
    trained = chainer.optimizers.Adam(0.05).setup(MLP(0))
    for batch in data:
        trained.update(trained.target, *batch)
    snapshots = saved(trained.target), saved(trained)
    model = MLP(5)
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(0.05), comm)
    optimizer.setup(model)
    if when == "later":
        optimizer.update(model, *part(comm, data[0]))
    if comm.rank == 0:
        load(snapshots[0], model)
        load(snapshots[1], optimizer.actual_optimizer)
    if when == "later":
        step = lambda: optimizer.update(model, *part(comm, data[0]))  # noqa: E731
        assert_all_raise(comm, step, MismatchError, "t=3", "t=1")
        optimizer.bcast_state(root=0)
    for batch in data:
        trained.update(trained.target, *batch)
        optimizer.update(model, *part(comm, batch))
    ok = optimizer.t == 6 and are_close(weights(model), weights(trained.target))
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, model), f"t={optimizer.t}")


@pytest.mark.parallel([2, 3])
def test_bcast_state_sends_hyperparameters_and_master_weights(comm):
    root = comm.size - 1
    actual = chainer.optimizers.MomentumSGD(0.1 * (comm.rank + 1))
    model = chainer.Chain(fc=L.Linear(2, 3))
    with chainer.using_config("dtype", np.dtype(np.float16)):
        model.add_link("half", L.Linear(2, 3))
    actual.use_fp32_update()
    optimizer = create_multi_node_optimizer(actual, comm).setup(model)
    for parameter in model.params():
        parameter.grad = np.full(parameter.shape, comm.rank, parameter.dtype)
    actual.update()
    model.fc.W.update_rule.hyperparam.lr = 0.5 if comm.rank == root else 0.7
    if comm.rank == root:
        model.fc.b.update_rule.enabled = False
        actual.loss_scaling(scale=8)
    optimizer.bcast_state(root=root)
    rule = model.half.W.update_rule
    found = (
        actual.lr,
        model.fc.W.update_rule.hyperparam.lr,
        model.fc.b.update_rule.enabled,
        actual._loss_scale,
        rule.state["v"].tobytes(),
        rule._fp32_param.array.tobytes(),
        model.half.W.array.tobytes(),
    )
    everyone = comm.allgather_obj(found)
    assert_all_ranks(comm, all(other == everyone[root] for other in everyone))


@pytest.mark.reports("chainer/chainermn#73")
@pytest.mark.parallel([2, 3])
def test_a_hyperparameter_changed_on_one_rank_is_an_error_on_all(comm):
    model = MLP()
    optimizer = multi_node_sgd(comm, model)
    batch = part(comm, batches(1, 12)[0])
    for _ in range(2):
        optimizer.update(model, *batch)
    before = weights(model)
    step = lambda: optimizer.update(model, *batch)  # noqa: E731
    if comm.rank == 1:
        optimizer.lr = 0.0125
    assert_all_raise(comm, step, MismatchError, "lr=0.1", "lr=0.0125", "rank 1")
    optimizer.lr = 0.1
    rule = model.l1.W.update_rule
    if comm.rank == 0:
        rule.enabled = False
    assert_all_raise(comm, step, MismatchError, "/l1/W frozen", "rank 0")
    rule.enabled = True
    if comm.rank == 0:
        rule.hyperparam.lr = 7.0
    assert_all_raise(comm, step, MismatchError, "/l1/W.lr=7.0")
    ok = all((before[k] == v).all() for k, v in weights(model).items())
    assert_all_ranks(comm, ok, "the weights moved")


@pytest.mark.reports("horovod/horovod#100", "alan-turing-institute/autocast#386")
@pytest.mark.parallel([2, 3])
def test_a_skipped_step_does_not_mix_two_models(comm):
    """As in the training of a GAN, with two networks of equal shape."""
    models = [MLP(0), MLP(1)]
    optimizers = [multi_node_sgd(comm, model) for model in models]
    batch = part(comm, batches(1, 12)[0])
    for optimizer in optimizers:
        optimizer.update(optimizer.target, *batch)
    before = [weights(model) for model in models]
    chosen = optimizers[1 if comm.rank == 1 else 0]
    assert_all_raise(
        comm,
        lambda: chosen.update(chosen.target, *batch),
        MismatchError,
        "optimizer 0 (SGD)",
        "optimizer 1 (SGD)",
        "rank 1",
    )
    for model, old in zip(models, before, strict=True):
        ok = all((old[k] == v).all() for k, v in weights(model).items())
        assert_all_ranks(comm, ok, "the weights moved")
    # The ranks are in step; the step that failed can be taken.
    for optimizer in optimizers:
        optimizer.update(optimizer.target, *batch)
    assert_all_ranks(comm, all(same_on_all_ranks(comm, model) for model in models))


@pytest.mark.reports("chainer/chainer#6133", "horovod/horovod#336", "NVIDIA/nccl#1417")
@pytest.mark.parallel([2, 3])
def test_models_of_other_shapes_are_an_error_on_all(comm):
    model = L.Classifier(L.Linear(5, 3 if comm.rank else 4))
    optimizer = multi_node_sgd(comm, model)
    assert_all_raise(
        comm,
        lambda: optimizer.update(model, *part(comm, batches(1, 12)[0])),
        MismatchError,
        "/predictor/W",
        "(4, 5)",
        "(3, 5)",
    )


class Branches(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.trunk = L.Linear(5, 4)
            self.branch = L.Linear(None, 4)
            self.unused = L.Linear(None, 4)

    def forward(self, x, takes_branch):
        y = self.trunk(x)
        if takes_branch:
            y = self.branch(y)
        return F.mean(y * y)


@pytest.mark.reports(
    "pytorch/pytorch#44957", "pytorch/pytorch#72434", "chainer/chainermn#148"
)
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("has_loss_function", [True, False])
def test_a_lazily_sized_layer_first_used_on_one_rank(comm, has_loss_function):
    np.random.seed(comm.rank)
    model = Branches()
    comm.bcast_data(model)
    optimizer = multi_node_sgd(comm, model)
    x = np.full((2, 5), comm.rank + 1, "f")
    for step in range(4):
        takes_branch = step > 0 and comm.rank == 1
        if has_loss_function:
            optimizer.update(model, x, takes_branch)
        else:
            model.cleargrads()
            model(x, takes_branch).backward()
            optimizer.update()
        expected = 4 if step == 0 else 5  # lazily sized layers have a bias
        assert_all_ranks(comm, len(weights(model)) == expected)
        assert_all_ranks(comm, same_on_all_ranks(comm, model), f"step {step}")
    assert_all_ranks(comm, optimizer.t == 4)
    assert all(np.isfinite(w).all() for w in weights(model).values())


@pytest.mark.parallel([2, 3])
def test_lazily_sized_layers_used_on_several_ranks_with_other_values(comm):
    """Recurrent state and gradient are those of one forward with common weights."""
    np.random.seed(comm.rank)
    model = chainer.Chain(rnn=L.LSTM(None, 4), out=L.Linear(4, 1))
    optimizer = multi_node_sgd(comm, model)
    x = np.ones((2, 3), "f")
    n_calls = 0

    def loss():
        nonlocal n_calls
        n_calls += 1
        return F.mean(model.out(model.rnn(x)))

    optimizer.update(loss)
    state = model.rnn.h.array.copy()
    same = same_on_all_ranks(comm, model)
    assert_all_ranks(comm, n_calls == 2 and same, f"{n_calls} {same}")
    # The gradient has been applied; undo that to compute the state again.
    for parameter in model.params():
        parameter.array += 0.1 * parameter.grad
    model.rnn.reset_state()
    loss()
    close = np.allclose(model.rnn.h.array, state, atol=1e-6)
    assert_all_ranks(comm, close, f"{model.rnn.h.array} {state}")


@pytest.mark.parallel([2, 3])
def test_a_layer_initialised_by_an_evaluation_on_one_rank(comm):
    np.random.seed(comm.rank)
    model = L.Classifier(L.Linear(None, 3))
    optimizer = multi_node_sgd(comm, model)
    batch = part(comm, batches(1, 12)[0])
    if comm.rank == 1:
        model(*batch)
    for _ in range(2):
        optimizer.update(model, *batch)
        assert_all_ranks(comm, same_on_all_ranks(comm, model))
    assert optimizer.t == 2


@pytest.mark.parallel([2, 3])
def test_a_layer_added_later_is_synchronised_without_losing_a_step(comm):
    np.random.seed(comm.rank)
    model = chainer.Chain(first=L.Linear(5, 5))
    optimizer = multi_node_sgd(comm, model)
    x = np.full((2, 5), comm.rank + 1, "f")
    optimizer.update(lambda: F.mean(model.first(x)))
    model.add_link("second", L.Linear(5, 2))
    for parameter in model.second.params():
        parameter.update_rule = optimizer.create_update_rule()
    optimizer.update(lambda: F.mean(model.second(model.first(x))))
    assert_all_ranks(comm, optimizer.t == 2 and same_on_all_ranks(comm, model))


@pytest.mark.parallel([2, 3])
def test_batch_statistics_start_equal(comm):
    model = chainer.Chain(bn=L.BatchNormalization(5), fc=L.Linear(5, 2))
    model.bn.avg_mean[...] = comm.rank
    optimizer = multi_node_sgd(comm, model)
    x = np.zeros((2, 5), "f")
    optimizer.update(lambda: F.mean(model.fc(model.bn(x))))
    assert_all_ranks(comm, (model.bn.avg_mean == 0).all(), f"{model.bn.avg_mean}")


@pytest.mark.parallel([2, 3])
def test_custom_loop_from_unequal_weights_warns_once_and_still_steps(comm):
    model = MLP(comm.rank)
    optimizer = multi_node_sgd(comm, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(2, 12):
            model.cleargrads()
            model(*part(comm, batch)).backward()
            optimizer.update()
    texts = [str(w.message) for w in caught if "bcast_data" in str(w.message)]
    assert_all_ranks(comm, len(texts) == (comm.rank == 0), f"{texts}")
    assert_all_ranks(comm, same_on_all_ranks(comm, model) and optimizer.t == 2)


@pytest.mark.parallel([2, 3])
def test_custom_loop_from_equal_weights_does_not_warn(comm):
    model = MLP(comm.rank)
    optimizer = multi_node_sgd(comm, model)
    comm.bcast_data(model)
    model.cleargrads()
    model(*part(comm, batches(1, 12)[0])).backward()
    optimizer.update()
    assert_all_ranks(comm, same_on_all_ranks(comm, model) and optimizer.t == 1)


class Scaled(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.ones((2, 2), "f"))
            self.half = chainer.Parameter(np.ones(2, np.float16))
            self.double = chainer.Parameter(np.ones(2, "d"))

    def forward(self, factor, uses_double=True):
        loss = F.sum(self.w) + F.cast(F.sum(self.half), "f") * factor
        if uses_double:
            loss += F.cast(F.sum(self.double), "f")
        return loss


@pytest.mark.reports("chainer/chainer#5659")
@pytest.mark.parallel([2, 3])
def test_a_fixed_loss_scale_does_not_change_the_step(comm):
    model = Scaled()
    optimizer = multi_node_sgd(comm, model, lr=0.125)
    optimizer.set_loss_scale(128)
    optimizer.update(model, np.float32(1), comm.rank == 0)
    ok = (
        (model.w.array == 0.875).all()
        and (model.half.array == 0.875).all()
        and np.allclose(model.double.array, 1 - 0.125 / comm.size)
        and model.half.dtype == np.float16
        and model.double.dtype == np.float64
    )
    assert_all_ranks(comm, bool(ok), f"{weights(model)}")


@pytest.mark.parallel([2, 3])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_overflow_on_one_rank_makes_all_ranks_skip(comm):
    model = Scaled()
    optimizer = multi_node_sgd(comm, model)
    optimizer.loss_scaling(interval=10)
    optimizer.update(model, np.float32(1))
    before, scale = weights(model), optimizer._loss_scale
    with pytest.warns(UserWarning, match="Non finite"):
        optimizer.update(model, np.float32(1e6 if comm.rank == 1 else 1))
    ok = all((before[k] == v).all() for k, v in weights(model).items())
    assert_all_ranks(comm, ok and optimizer._loss_scale == scale / 2)
    optimizer.update(model, np.float32(1))
    moved = any((before[k] != v).any() for k, v in weights(model).items())
    assert_all_ranks(comm, moved and same_on_all_ranks(comm, model))


@pytest.mark.parallel([2, 3])
def test_copies_share_the_communicator_and_train_on_their_own(comm):
    model = MLP(comm.rank)
    optimizer = multi_node_sgd(comm, model)
    batch = part(comm, batches(1, 12)[0])
    optimizer.update(model, *batch)
    # One rank may keep copies that it never uses.
    if comm.rank == 1:
        copy.deepcopy(optimizer)
    twins = [
        copy.copy(optimizer),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
    ]
    for twin in twins:
        assert twin.communicator is comm
        assert twin.actual_optimizer is not optimizer.actual_optimizer
        twin.update(twin.target, *batch)
        assert_all_ranks(comm, twin.t == 2 and same_on_all_ranks(comm, twin.target))
    assert twins[0].target is model
    assert twins[1].target is not model
    assert optimizer.t == 1
    chosen = twins[1] if comm.rank == 0 else twins[2]
    assert_all_raise(
        comm,
        lambda: chosen.update(chosen.target, *batch),
        MismatchError,
        "optimizer 0.1",
        "optimizer 0.2",
    )


@pytest.mark.parallel([2, 3])
def test_an_error_in_one_ranks_loss_stays_there(comm):
    model = MLP()
    optimizer = multi_node_sgd(comm, model)
    batch = part(comm, batches(1, 12)[0])
    optimizer.update(model, *batch)

    def loss(x, t):
        if comm.rank == 1:
            raise KeyError("label 11")
        return model(x, t)

    def step():
        try:
            optimizer.update(loss, *batch)
        except KeyError:
            comm.barrier()
            raise

    error = raised_by(step)
    expected = (MismatchError, KeyError, CommunicatorError)
    assert_all_ranks(comm, isinstance(error, expected), f"{error!r}")


@pytest.mark.parallel([2, 3])
def test_no_samples_at_all_is_an_error_on_all(comm):
    model = MLP()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, count_samples=lambda n: n
    ).setup(model)
    model.cleargrads()
    step = lambda n: lambda: optimizer.update(None, n)  # noqa: E731
    assert_all_raise(comm, step(0), ValueError, "no rank has any")
    bad = -1 if comm.rank == 1 else 1
    assert_all_raise(comm, step(bad), ValueError, "rank 1", "-1")


@pytest.mark.parallel(2)
def test_a_subset_of_the_ranks_trains(comm):
    with create_communicator("naive") as world:
        group = world.split(0 if world.rank == 1 else None, 0)
        if group is not None:
            model = MLP()
            multi_node_sgd(group, model).update(model, *batches(1, 4)[0])
            group.finalize()
        assert world.allreduce_obj(1) == 2


@pytest.mark.parallel([2, 3])
def test_hooks_that_differ_between_ranks_are_an_error_on_all(comm):
    model = MLP()
    optimizer = multi_node_sgd(comm, model)
    batch = part(comm, batches(1, 12)[0])
    step = lambda: optimizer.update(model, *batch)  # noqa: E731
    step()
    decay = chainer.optimizer_hooks.WeightDecay(0.1)
    if comm.rank == 1:
        optimizer.add_hook(decay)
    assert_all_raise(comm, step, MismatchError, "WeightDecay(rate=0.1)", "rank 1")
    if comm.rank == 1:
        decay.rate = 0.2
    else:
        optimizer.add_hook(decay)
    assert_all_raise(comm, step, MismatchError, "WeightDecay(rate=0.2)", "rank 1")
    decay.rate = 0.1
    step()
    rule = model.l1.W.update_rule
    if comm.rank == 0:
        rule.add_hook(chainer.optimizer_hooks.GradientNoise(0.1), "noise")
    assert_all_raise(comm, step, MismatchError, "/l1/W.noise", "rank 0")
    if comm.rank == 0:
        rule.remove_hook("noise")
        rule.use_fp32_update()
    assert_all_raise(comm, step, MismatchError, "/l1/W float32 update")


@pytest.mark.parallel([2, 3])
def test_a_rank_without_samples_computes_no_loss(comm):
    # Chainer's losses divide by the number of samples, or refuse none.
    x, t = batches(1, 6)[0]
    models = [MLP(), MLP()]
    single = chainer.optimizers.SGD(0.1).setup(models[1])
    single.update(models[1], x, t)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, count_samples=count_first_argument
    ).setup(models[0])
    mine = slice(None) if comm.rank == 0 else slice(0, 0)

    def loss(x, t):
        assert len(x), "called without samples"
        return models[0](x, t)

    optimizer.update(loss, x[mine], t[mine])
    ok = are_close(weights(models[0]), weights(models[1]))
    assert_all_ranks(comm, ok, "not the step of one process")
    assert_all_ranks(comm, same_on_all_ranks(comm, models[0]))


@pytest.mark.parallel([2])
@pytest.mark.parametrize("count", [lambda *_: {}["n"], lambda *_: 2.7, lambda *_: -1])
def test_a_failing_count_of_samples_is_an_error_on_all(comm, count):
    model = MLP()
    counter = count if comm.rank == 1 else count_first_argument
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, count_samples=counter
    ).setup(model)
    error = raised_by(lambda: optimizer.update(model, *batches(1, 4)[0]))
    assert_all_ranks(comm, error is not None, "no error")
    assert comm.allreduce_obj(1) == comm.size


def test_what_is_no_optimizer_is_refused():
    with (
        create_communicator("flat") as comm,
        pytest.raises(TypeError, match="Optimizer"),
    ):
        create_multi_node_optimizer("sgd", comm)
