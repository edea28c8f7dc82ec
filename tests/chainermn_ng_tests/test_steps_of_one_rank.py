"""With one rank a step is Chainer's own: same bits, and nobody is asked."""

from __future__ import annotations

import copy
import pickle

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import optimizer_hooks
from helpers.chainer_models import MLP, batches, weights

from chainermn_ng.communicators import create_communicator
from chainermn_ng.optimizers import count_first_argument, create_multi_node_optimizer
from communicators import CommunicatorError
from communicators.recording import SpanRecorder

pytestmark = pytest.mark.parallel(1)

N_STEPS = 5
OPTIMIZERS = {
    "SGD": lambda: chainer.optimizers.SGD(0.3),
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.1),
    "Adam": lambda: chainer.optimizers.Adam(0.02),
    "AMSGrad": lambda: chainer.optimizers.AMSGrad(0.02),
    "RMSprop": lambda: chainer.optimizers.RMSprop(0.01),
    "AdaGrad": lambda: chainer.optimizers.AdaGrad(0.01),
}
HOOKS = {
    "no hook": list,
    "decay": lambda: [optimizer_hooks.WeightDecay(0.01)],
    "clipping": lambda: [optimizer_hooks.GradientClipping(0.01)],
    "decay of each": lambda: [
        optimizer_hooks.Lasso(0.01),
        optimizer_hooks.GradientLARS(),
    ],
}


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def train(optimizer, model, data, hooks=(), prepare=lambda optimizer: None):
    optimizer.setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    prepare(optimizer)
    for batch in data:
        optimizer.update(model, *batch)
    return weights(model)


@pytest.fixture
def agreements(comm):
    """Return how many agreements and other collectives there have been."""
    return lambda: comm.engine.n_collectives


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_bits_as_chainer_alone(comm, kind, hooks):
    data = batches(N_STEPS, 12)
    expected = train(OPTIMIZERS[kind](), MLP(0), data, HOOKS[hooks]())
    ours = create_multi_node_optimizer(OPTIMIZERS[kind](), comm)
    assert same_bits(train(ours, MLP(0), data, HOOKS[hooks]()), expected)
    assert ours.t == N_STEPS


@pytest.mark.parametrize("scaling", [None, 128.0, "dynamic"])
@pytest.mark.parametrize("wide", [False, True], ids=["", "float32 update"])
def test_same_bits_in_half_precision(comm, scaling, wide):
    data = [(x.astype("e"), t) for x, t in batches(N_STEPS, 12)]

    def prepare(optimizer):
        if scaling == "dynamic":
            optimizer.loss_scaling()
        elif scaling:
            optimizer.loss_scaling(scale=scaling)

    def optimizer():
        actual = chainer.optimizers.MomentumSGD(0.1)
        if wide:
            actual.use_fp32_update()
        return actual

    with chainer.using_config("dtype", np.float16):
        expected = train(optimizer(), MLP(0, dtype="e"), data, prepare=prepare)
        ours = create_multi_node_optimizer(optimizer(), comm)
        found = train(ours, MLP(0, dtype="e"), data, prepare=prepare)
    assert same_bits(found, expected)


def test_nobody_is_asked_after_the_first_step(comm, agreements):
    model = MLP(0)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, count_samples=count_first_argument
    )
    optimizer.setup(model)
    first, *others = batches(N_STEPS, 12)
    optimizer.update(model, *first)
    before = agreements()
    assert before > 0
    for batch in others:
        optimizer.update(model, *batch)
    for batch in others:
        model.cleargrads()
        model(*batch).backward()
        optimizer.update(None, *batch)
    assert agreements() == before
    assert optimizer.t == 2 * N_STEPS - 1


def test_layers_that_get_their_shape_and_layers_that_come_later(comm, agreements):
    def grow(optimizer):
        data = batches(2 * N_STEPS, 12)
        model = MLP(0, n_in=None)
        optimizer.setup(model)
        for batch in data[:N_STEPS]:
            optimizer.update(model, *batch)
        with model.init_scope():
            model.scale = chainer.Parameter(np.ones(1, "f"))
        model.scale.update_rule = optimizer.create_update_rule()
        for batch in data[N_STEPS:]:
            optimizer.update(lambda x, t: F.sum(model(x, t) * model.scale), *batch)
        return weights(model)

    expected = grow(chainer.optimizers.MomentumSGD(0.1))
    ours = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm)
    found = grow(ours)
    assert same_bits(found, expected)
    assert found["/scale"] != 1


class Sum(chainer.Chain):
    """Both of its parameters get one and the same gradient array."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.array([1, 2, 3], "f"))
            self.b = chainer.Parameter(np.array([4, 5, 6], "f"))
            self.absent = chainer.Parameter(np.array([7], "f"))

    def forward(self, x):
        return F.sum((self.a + self.b) * x)


def decay_of(optimizer, where):
    """Add weight decay to the optimizer, or to each of its update rules."""
    if where == "optimizer":
        optimizer.add_hook(optimizer_hooks.WeightDecay(0.5))
        return
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(optimizer_hooks.WeightDecay(0.5))


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("where", ["optimizer", "rules"])
def test_hooks_write_to_one_gradient_each(comm, where, begin):
    """Also where Chainer alone would decay the shared array twice, or fails."""
    model = Sum()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    x = np.array([1, 1, 2], "f")
    expected = {name: p.array.copy() for name, p in model.namedparams()}
    for step in range(begin + 3):
        if step == begin:
            decay_of(optimizer, where)
        optimizer.update(model, x)
        for name, array in expected.items():
            gradient = 0 if name == "/absent" else x
            decay = 0.5 * array if step >= begin else 0
            array -= np.float32(0.1) * (gradient + decay)
    for name, p in model.namedparams():
        assert np.allclose(p.array, expected[name], atol=1e-5), name


def test_rule_of_the_users_may_write_to_its_gradient(comm):
    class Halving(chainer.optimizers.sgd.SGDRule):
        def update_core(self, param):
            param.grad *= 0.5
            super().update_core(param)

    model = Sum()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1), comm)
    optimizer.setup(model)
    for p in model.params():
        p.update_rule = Halving(optimizer.hyperparam)
    for _ in range(3):
        optimizer.update(model, np.ones(3, "f"))
    assert model.a.array.tolist() == [-0.5, 0.5, 1.5]
    assert model.b.array.tolist() == [2.5, 3.5, 4.5]


class Bare(chainer.optimizers.SGD):
    """Leaves it to others to give zeros to parameters without a gradient."""

    seen = None

    def reallocate_cleared_grads(self):
        pass

    def update(self, lossfun=None, *args, **kwds):
        assert lossfun is None
        self.seen = {name: p.grad is not None for name, p in self.target.namedparams()}
        super().update()


@pytest.mark.parametrize("zero_fill", [True, False])
def test_zero_fill(comm, zero_fill):
    model = Sum()
    optimizer = create_multi_node_optimizer(Bare(0.1), comm, zero_fill=zero_fill)
    optimizer.setup(model)
    for _ in range(3):
        optimizer.update(model, np.ones(3, "f"))
        assert optimizer.seen == {"/a": True, "/b": True, "/absent": zero_fill}


def test_mistakes_in_counting_are_errors_at_each_step(comm):
    model, (batch,) = MLP(0), batches(1, 12)
    counts = []
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, count_samples=lambda *args: counts.pop()
    )
    optimizer.setup(model)
    for _ in range(2):
        counts.append(12)
        optimizer.update(model, *batch)
        for count, error, text in [
            (-1, ValueError, "count_samples returned -1"),
            (0, ValueError, "no rank has any"),
            (1.5, TypeError, "integer"),
        ]:
            counts.append(count)
            with pytest.raises(error, match=text):
                optimizer.update(model, *batch)
    assert optimizer.t == 2


def test_gradients_are_rounded_as_on_the_wire():
    with create_communicator("flat", allreduce_grad_dtype="float16") as comm:
        model, data = MLP(0), batches(N_STEPS, 12)
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
        optimizer.setup(model)
        for batch in data:
            optimizer.update(model, *batch)
            for p in model.params():
                assert (p.grad == p.grad.astype("e")).all()
                assert p.grad.any()


def test_debug_mode_asks_as_on_several_ranks(monkeypatch):
    monkeypatch.setenv("CHAINERMN_NG_DEBUG", "1")
    with create_communicator("flat") as comm:
        model, (batch,) = MLP(0), batches(1, 12)
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
        optimizer.setup(model).update(model, *batch)
        before = comm.engine.n_collectives
        optimizer.update(model, *batch)
        assert comm.engine.n_collectives == before + 2


def test_finalized_communicator_is_an_error():
    comm = create_communicator("flat")
    model, (batch,) = MLP(0), batches(1, 12)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    optimizer.update(model, *batch)
    optimizer.update(model, *batch)
    comm.finalize()
    with pytest.raises(CommunicatorError, match="has been finalized"):
        optimizer.update(model, *batch)
    assert optimizer.t == 2


def test_absent_model_and_bad_loss_function_are_errors(comm):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    with pytest.raises(AttributeError):
        optimizer.update(lambda: None)
    model, (batch,) = MLP(0), batches(1, 12)
    optimizer.setup(model).update(model, *batch)
    with pytest.raises(AttributeError, match="backward"):
        optimizer.update(lambda *args: None, *batch)
    with pytest.raises(ZeroDivisionError):
        optimizer.update(lambda *args: 1 / 0, *batch)
    optimizer.update(model, *batch)
    assert optimizer.t == 2


def test_double_buffering_stays_one_step_behind(comm):
    model, data = MLP(0), batches(N_STEPS, 12)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, double_buffering=True
    )
    optimizer.setup(model)
    for k, batch in enumerate(data):
        optimizer.update(model, *batch)
        assert optimizer.t == k
    optimizer.flush()
    assert optimizer.t == N_STEPS


def test_copies_and_pickles_take_their_own_steps(comm):
    model, (batch,) = MLP(0), batches(1, 12)
    optimizer = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm)
    optimizer.setup(model)
    for _ in range(3):
        optimizer.update(model, *batch)
    twin = copy.deepcopy(optimizer)
    twin.add_hook(optimizer_hooks.WeightDecay(0.1))
    assert not any(optimizer._writers)
    for _ in range(2):
        optimizer.update(model, *batch)
        twin.update(twin.target, *batch)
    assert any(twin._writers)
    assert not same_bits(weights(twin.target), weights(model))
    actual = pickle.loads(pickle.dumps(optimizer.actual_optimizer))
    again = create_multi_node_optimizer(actual, comm)
    for o in (optimizer, again):
        o.update(o.target, *batch)
    assert same_bits(weights(again.target), weights(model))


def test_timeline_shows_the_parts_of_a_step(comm):
    recorder = SpanRecorder()
    model, (batch,) = MLP(0), batches(1, 12)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model).update(model, *batch)
    comm.engine.recorder = recorder
    optimizer.update(model, *batch)
    comm.engine.recorder = None
    names = [span.name for span in recorder.spans]
    assert names == ["forward", "backward", "average", "update"]
