"""Double buffering: which gradients are applied, when, and with what settings."""

import threading
import weakref

import chainer
import chainer.functions as F
import chainer.links as L
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
from helpers.stale_gradients import GradientRecorder, train_stale

import communicators
from chainermn_ng.communicators import create_communicator
from chainermn_ng.optimizers import (
    DoubleBufferingOptimizer,
    MultiNodeOptimizer,
    count_first_argument,
    create_multi_node_optimizer,
)

REAL = [n for n in communicators.available_communicators() if n != "dummy"]
KINDS = {
    "SGD": lambda: chainer.optimizers.SGD(0.3),
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.1),
    "Adam": lambda: chainer.optimizers.Adam(0.02),
}


class Line(chainer.Chain):
    """Its gradient is the input, whatever the weights."""

    def __init__(self, dtype="d"):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros(3, dtype))

    def forward(self, x):
        return F.sum(self.w * np.full(3, x, self.w.dtype))


def buffered(comm, model, actual=None, **options):
    actual = actual or chainer.optimizers.SGD(1.0)
    optimizer = create_multi_node_optimizer(
        actual, comm, double_buffering=True, **options
    )
    return optimizer.setup(model)


def recorded(comm, model, actual=None, **options):
    """Return an optimizer and the gradients that it has applied so far."""
    optimizer = buffered(comm, model, actual, **options)
    recorder = GradientRecorder("/w")
    optimizer.add_hook(recorder)
    return optimizer, recorder.seen


def local(comm, k):
    """Return gradient k of this rank."""
    return 100.0 * k + comm.rank


def mean_over_ranks(comm, k):
    return 100.0 * k + (comm.size - 1) / 2


def are_means(comm, seen, numbers):
    expected = [mean_over_ranks(comm, k) for k in numbers]
    return len(seen) == len(expected) and np.allclose(seen, expected, atol=1e-9)


# -- which gradients ---------------------------------------------------------------


@pytest.mark.reports(
    "chainer/chainermn#201", "chainer/chainermn#216", "NVIDIA/apex#1135"
)
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("name", REAL)
def test_call_k_applies_gradient_k_minus_1(name):
    with create_communicator(name, timeout_s=30) as comm:
        model = Line()
        optimizer, seen = recorded(comm, model)
        assert isinstance(optimizer, MultiNodeOptimizer)
        for k in range(1, 6):
            optimizer.update(model, local(comm, k))
            ok = are_means(comm, seen, range(1, k)) and optimizer.t == k - 1
            assert_all_ranks(comm, ok, f"{k}: {seen}, t={optimizer.t}")
        optimizer.flush()
        ok = are_means(comm, seen, range(1, 6)) and optimizer.t == 5
        assert_all_ranks(comm, ok, f"{seen}, t={optimizer.t}")
        total = -sum(mean_over_ranks(comm, k) for k in range(1, 6))
        ok = np.allclose(model.w.array, total) and same_on_all_ranks(comm, model)
        assert_all_ranks(comm, ok, f"{model.w.array}")


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", ["naive", "flat", "multi_ring", "auto"])
def test_the_steps_are_those_of_stale_gradients_in_one_process(name, kind):
    data = batches(5, 12)
    alone = MLP(0)
    losses = [lambda batch=batch: alone(*batch) for batch in data]
    train_stale(KINDS[kind]().setup(alone), alone, losses, flushes=True)
    with create_communicator(name, timeout_s=30) as comm:
        model = MLP(comm.rank)
        optimizer = buffered(comm, model, KINDS[kind]())
        for batch in data:
            optimizer.update(model, *part(comm, batch))
        optimizer.flush()
        assert_all_ranks(comm, same_on_all_ranks(comm, model), "ranks drifted apart")
        assert_all_ranks(comm, are_close(weights(model), weights(alone)))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hierarchical", {}),
        ("two_dimensional", {}),
        ("multi_ring", {}),
        ("auto", {}),
        ("flat", {"allreduce_grad_dtype": "float16", "bucket_bytes": 50}),
        # The default dims do not fit hosts of unequal size; given ones must be kept.
        ("multi_ring", {"dims": "all"}),
    ],
)
def test_pretended_hosts_and_options(name, options):
    size = chainer_size()
    topology = {2: "2x1", 3: "2+1", 4: "2x2"}[size]
    if options.get("dims") == "all":
        options = {"dims": (size,)}
    elif size == 3 and name in ("two_dimensional", "multi_ring"):
        topology = "3x1"
    with create_communicator(name, topology=topology, timeout_s=30, **options) as comm:
        model = Line()
        optimizer, seen = recorded(comm, model)
        for k in range(1, 5):
            optimizer.update(model, local(comm, k))
        optimizer.flush()
        ok = np.allclose(
            seen, [mean_over_ranks(comm, k) for k in range(1, 5)], rtol=2e-3
        )
        assert_all_ranks(comm, ok and same_on_all_ranks(comm, model), f"{seen}")


def chainer_size():
    with create_communicator("naive") as comm:
        return comm.size


@pytest.mark.parallel([2])
def test_the_average_travels_as_the_communicator_is_set():
    # Between hosts: ranks of one host copy the arrays themselves.
    with create_communicator("flat", topology="2x1") as comm:
        check_that_the_average_travels_as_set(comm)


def check_that_the_average_travels_as_set(comm):
    model = Line("f")
    optimizer, seen = recorded(comm, model)
    sent = []
    for k, dtype in enumerate((None, "float16", "float64", None), start=1):
        comm.set_config("allreduce_grad_dtype", dtype)
        before = comm.sent_bytes.get("world", 0)
        optimizer.update(model, local(comm, k))
        comm.background("not the first call").wait_in_flight()
        sent.append(comm.allreduce_obj(comm.sent_bytes["world"] - before))
    optimizer.flush()
    # Three numbers, sent twice by the ranks together; the first time, once more, to
    # make the model the same.
    ok = sent == [3 * 3 * 4, 2 * 3 * 2, 2 * 3 * 8, 2 * 3 * 4]
    assert_all_ranks(comm, ok and are_means(comm, seen, (1, 2, 3, 4)), f"{sent} {seen}")


@pytest.mark.parallel([1, 2])
def test_the_first_update_applies_nothing(comm):
    model = MLP(comm.rank)
    expected = weights(MLP(0))
    optimizer = buffered(comm, model, chainer.optimizers.Adam())
    calls = []
    optimizer.add_hook(lambda _: calls.append("pre"), "pre", timing="pre")
    optimizer.add_hook(lambda _: calls.append("post"), "post", timing="post")
    optimizer.use_auto_new_epoch = True
    optimizer.update(model, *part(comm, batches(1, 12)[0]))
    optimizer.new_epoch(auto=True)
    ok = all((v == expected[k]).all() for k, v in weights(model).items())
    assert_all_ranks(comm, ok, "not rank 0's weights")
    ok = not calls and (optimizer.t, optimizer.epoch) == (0, 1)
    ok = ok and all((p.grad == 0).all() for p in model.params())
    ok = ok and optimizer.has_gradient_in_flight
    assert_all_ranks(comm, ok, f"{calls} {optimizer.t} {optimizer.epoch}")
    optimizer.flush()
    ok = calls == ["pre", "post"] and optimizer.t == 1
    ok = ok and not optimizer.has_gradient_in_flight
    assert_all_ranks(comm, ok, f"{calls}")
    optimizer.flush()
    assert_all_ranks(comm, optimizer.t == 1 and len(calls) == 2, "nothing to flush")


@pytest.mark.parallel([1, 2])
def test_after_a_flush_it_begins_anew(comm):
    model = Line()
    optimizer, seen = recorded(comm, model)
    for k in range(1, 7):
        optimizer.update(model, local(comm, k))
        if k in (2, 3):
            optimizer.flush()
    optimizer.flush()
    assert_all_ranks(comm, are_means(comm, seen, range(1, 7)), f"{seen}")


@pytest.mark.parallel([1, 2])
def test_flush_without_double_buffering_does_nothing(comm):
    model = Line()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1), comm)
    optimizer.setup(model).update(model, 1.0)
    optimizer.flush()
    assert not isinstance(optimizer, DoubleBufferingOptimizer)
    assert_all_ranks(comm, optimizer.t == 1 and (model.w.array == -1).all())


@pytest.mark.parallel([2, 3])
def test_gradient_accumulation_makes_one_average_a_step(comm):
    model = Line()
    optimizer, seen = recorded(comm, model)
    comm.bcast_data(model)
    for k in range(1, 4):
        model.cleargrads()
        for _ in range(2):
            (model(local(comm, k)) / 2).backward()
        optimizer.update()
    optimizer.flush()
    assert_all_ranks(comm, are_means(comm, seen, (1, 2, 3)), f"{seen}")


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("ignore:.*(zero|use_clear)grad:DeprecationWarning")
def test_gradients_that_are_zeroed_instead_of_cleared(comm):
    model = Line()
    optimizer, seen = recorded(comm, model)
    optimizer.use_cleargrads(False)
    for k in range(1, 5):
        optimizer.update(model, local(comm, k))
    optimizer.flush()
    assert_all_ranks(comm, are_means(comm, seen, range(1, 5)), f"{seen}")


# -- the thread --------------------------------------------------------------------


@pytest.mark.parallel([1, 2, 3])
def test_the_average_arrives_while_the_next_loss_is_computed(comm, monkeypatch):
    """The thread begins, and ends, inside of the second call of the loss function."""
    model = Line()
    optimizer, seen = recorded(comm, model)
    engine = comm.background("test").engine
    events = []
    is_computing, has_averaged = threading.Event(), threading.Event()
    reduce = engine.allreduce_arrays

    def wait_for_the_loss(*args, **kwargs):
        assert is_computing.wait(timeout=20)
        events.append("average begins")
        result = reduce(*args, **kwargs)
        events.append("average ends")
        has_averaged.set()
        return result

    monkeypatch.setattr(engine, "allreduce_arrays", wait_for_the_loss)

    def loss(x):
        events.append("loss begins")
        # The main thread's own collectives go on meanwhile.
        assert comm.allreduce_obj(1) == comm.size
        if not comm.engine.devices.host.uses_nccl:
            # Two NCCL communicators take turns: this would wait for the average.
            assert comm.bcast(np.ones(2))[0] == 1
        is_computing.set()
        assert has_averaged.wait(timeout=20)
        events.append("loss ends")
        return model(x)

    optimizer.update(model, local(comm, 1))
    events.append("update 1 ends")
    optimizer.update(loss, local(comm, 2))
    expected = ["update 1 ends", "loss begins", "average begins", "average ends"]
    ok = events[:5] == [*expected, "loss ends"]
    assert_all_ranks(comm, ok and are_means(comm, seen, [1]), f"{events} {seen}")
    optimizer.flush()


@pytest.mark.parallel([2])
def test_in_flight_gradients_are_in_memory_of_their_own(comm, monkeypatch):
    """What the main thread does to the parameters' gradients does not reach them."""
    model = Line()
    optimizer, seen = recorded(comm, model)
    engine = comm.background("test").engine
    goes_on = threading.Semaphore(0)
    reduce = engine.allreduce_arrays

    def hold_back(*args, **kwargs):
        assert goes_on.acquire(timeout=20)
        return reduce(*args, **kwargs)

    monkeypatch.setattr(engine, "allreduce_arrays", hold_back)
    for k in range(1, 4):
        optimizer.update(model, local(comm, k))
        for parameter in model.params():
            parameter.grad[...] = np.nan
        goes_on.release()
    optimizer.flush()
    assert_all_ranks(comm, are_means(comm, seen, (1, 2, 3)), f"{seen}")


@pytest.mark.parallel([1, 2])
def test_what_has_been_applied_is_not_kept(comm):
    """No more memory than one more set of gradients."""
    model = Line()
    optimizer, _ = recorded(comm, model)
    background = comm.background("test")
    for k in (1, 2):
        optimizer.update(model, local(comm, k))
        background.wait_in_flight()
    (array,) = optimizer._in_flight.averages().arrays.values()
    reference = weakref.ref(array)
    del array
    optimizer.flush()
    background.wait_in_flight()
    model.cleargrads()
    assert_all_ranks(comm, reference() is None, "an applied gradient is kept")


@pytest.mark.parallel([2])
def test_finalizing_the_communicator_waits_for_the_thread(monkeypatch):
    with create_communicator("flat", timeout_s=30) as comm:
        model = Line()
        optimizer, _ = recorded(comm, model)
        optimizer.update(model, local(comm, 1))
    with pytest.raises(communicators.CommunicatorError, match="finalized"):
        optimizer.flush()
    optimizer.serialize(chainer.serializers.DictionarySerializer())  # not lost


# -- with what settings ------------------------------------------------------------


def compare_with_one_process(comm, prepare, between=lambda optimizer, k: None):
    """Train on all ranks and in one process by hand; expect equal weights.

    Args:
        prepare: called with each optimizer after its set-up.
        between: called with the optimizer and k before step k.
    """
    data = batches(5, 12)
    alone = MLP(0)
    actual = chainer.optimizers.MomentumSGD(0.3).setup(alone)
    prepare(actual)
    train_stale(
        actual,
        alone,
        [lambda batch=batch: alone(*batch) for batch in data],
        between=lambda k: between(actual, k),
        flushes=True,
    )
    model = MLP(0)
    optimizer = buffered(comm, model, chainer.optimizers.MomentumSGD(0.3))
    prepare(optimizer)
    for k, batch in enumerate(data, start=1):
        between(optimizer, k)
        optimizer.update(model, *part(comm, batch))
    optimizer.flush()
    assert_all_ranks(comm, same_on_all_ranks(comm, model), "ranks drifted apart")
    assert_all_ranks(comm, are_close(weights(model), weights(alone)))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "hook",
    [optimizer_hooks.GradientClipping(0.05), optimizer_hooks.WeightDecay(0.1)],
    ids=lambda hook: hook.name,
)
def test_hooks_see_the_average_that_is_applied(comm, hook):
    compare_with_one_process(comm, lambda optimizer: optimizer.add_hook(hook))


@pytest.mark.parallel([2, 3])
def test_the_learning_rate_is_that_of_the_call_that_applies(comm):
    def shift(optimizer, k):
        optimizer.lr = 0.5**k

    compare_with_one_process(comm, lambda optimizer: None, shift)


@pytest.mark.parallel([2])
def test_frozen_parameters_stay(comm):
    def freeze(optimizer):
        optimizer.target.l1.disable_update()

    compare_with_one_process(comm, freeze)


@pytest.mark.parallel([2, 3])
def test_uneven_batches_weighted_by_samples(comm):
    sizes = [6, 2, 0][: comm.size]
    ends = np.cumsum(sizes)
    mine = slice(ends[comm.rank] - sizes[comm.rank], ends[comm.rank])
    data = batches(4, int(ends[-1]))
    alone, model = MLP(0), MLP(0)
    losses = [lambda batch=batch: alone(*batch) for batch in data]
    actual = chainer.optimizers.SGD(0.3).setup(alone)
    train_stale(actual, alone, losses, flushes=True)
    optimizer = buffered(
        comm, model, chainer.optimizers.SGD(0.3), count_samples=count_first_argument
    )
    for x, t in data:
        optimizer.update(model, x[mine], t[mine])
    optimizer.flush()
    ok = are_close(weights(model), weights(alone)) and same_on_all_ranks(comm, model)
    assert_all_ranks(comm, ok)


class Scaled(chainer.Chain):
    """Parameters of three dtypes; the gradient of each is ``factor``."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.ones((2, 2), "f"))
            self.half = chainer.Parameter(np.ones(2, np.float16))
            self.double = chainer.Parameter(np.ones(2, "d"))

    def forward(self, factor, uses_double=True):
        half, factor = F.cast(F.sum(self.half), "f"), np.float32(factor)
        loss = (F.sum(self.w) + half) * factor
        if uses_double:
            loss += F.cast(F.sum(self.double), "f") * factor
        return loss


@pytest.mark.parallel([1, 2, 3])
def test_each_gradient_is_divided_by_its_own_loss_scale(comm):
    model = Scaled()
    optimizer = buffered(comm, model, chainer.optimizers.SGD(0.125))
    expected = 1.0
    for k, scale in enumerate((128, 8, 2, 64), start=1):
        optimizer.set_loss_scale(scale)
        optimizer.update(model, k, comm.rank == 0)
        expected -= 0.125 * (k - 1)
        ok = (model.w.array == expected).all() and (model.half.array == expected).all()
        double = 1 - (1 - expected) / comm.size
        ok = ok and np.allclose(model.double.array, double)
        assert_all_ranks(comm, ok, f"{k}: {weights(model)}")
    optimizer.flush()
    ok = (model.w.array == expected - 0.5).all() and optimizer.t == 4
    kinds = (model.half.dtype, model.double.dtype) == (np.float16, np.float64)
    assert_all_ranks(comm, ok and kinds, f"{weights(model)}")


@pytest.mark.parallel([2, 3])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_overflow_on_one_rank_makes_all_ranks_skip_that_gradient(comm):
    model = Scaled()
    optimizer = buffered(comm, model, chainer.optimizers.SGD(0.125))
    optimizer.loss_scaling(interval=10)
    optimizer.update(model, 1)
    scale = optimizer._loss_scale
    optimizer.update(model, 1e6 if comm.rank == 1 else 1)  # applies the good one
    before = weights(model)
    ok = (before["/w"] == 0.875).all() and optimizer._loss_scale == 2 * scale
    assert_all_ranks(comm, ok, f"{before} {optimizer._loss_scale}")
    with pytest.warns(UserWarning, match="Non finite"):
        optimizer.update(model, 1)
    ok = all((before[k] == v).all() for k, v in weights(model).items())
    ok = ok and optimizer._loss_scale == scale and optimizer.t == 2
    assert_all_ranks(comm, ok, f"{weights(model)} {optimizer._loss_scale}")
    # The next one was computed with the scale from before the overflow.
    optimizer.flush()
    ok = (model.w.array == 0.75).all() and same_on_all_ranks(comm, model)
    assert_all_ranks(comm, ok, f"{weights(model)}")


class Branches(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.trunk = chainer.Parameter(np.zeros(2, "d"))
            self.branch = chainer.Parameter(np.zeros(2, "d"))
            self.unused = chainer.Parameter(np.zeros(2, "d"))

    def forward(self, x, takes_branch):
        loss = F.sum(self.trunk * np.full(2, x))
        if takes_branch:
            loss += F.sum(self.branch * np.full(2, x))
        return loss


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("zero_fill", [True, False])
def test_gradients_that_only_some_ranks_have(comm, zero_fill, monkeypatch):
    model = Branches()
    optimizer = buffered(comm, model, zero_fill=zero_fill)
    given = {}
    actual = optimizer.actual_optimizer
    update = actual.update

    def note(*args):
        given.update({name: p.grad for name, p in model.namedparams()})
        update(*args)

    monkeypatch.setattr(actual, "update", note)
    # Gradient 1 takes the branch on the last rank alone, gradient 2 on none.
    optimizer.update(model, 6.0, comm.rank == comm.size - 1)
    optimizer.update(model, 12.0, False)
    ok = np.allclose(given["/trunk"], 6) and np.allclose(
        given["/branch"], 6 / comm.size
    )
    unused = given["/unused"]
    ok = ok and ((unused == 0).all() if zero_fill else unused is None)
    assert_all_ranks(comm, ok, f"{given}")
    optimizer.update(model, 1.0, True)
    branch = given["/branch"]
    ok = np.allclose(given["/trunk"], 12)
    ok = ok and ((branch == 0).all() if zero_fill else branch is None)
    assert_all_ranks(comm, ok, f"{given}")
    optimizer.flush()
    ok = np.allclose(model.branch.array, -6 / comm.size - 1)
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, model), f"{weights(model)}")


@pytest.mark.parallel([1, 2, 3])
def test_gradients_that_share_memory(comm):
    class Pair(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.a = chainer.Parameter(np.zeros(3, "f"))
                self.b = chainer.Parameter(np.zeros(3, "f"))

        def forward(self, x):
            # Chainer hands one array to both, or a view that repeats one number.
            return F.sum((self.a + self.b) * np.float32(x))

    model = Pair()
    optimizer = buffered(comm, model)
    for k in (1, 2, 3):
        optimizer.update(model, local(comm, k))
    optimizer.flush()
    expected = -sum(mean_over_ranks(comm, k) for k in (1, 2, 3))
    ok = np.allclose(model.a.array, expected) and np.allclose(model.b.array, expected)
    assert_all_ranks(comm, ok, f"{weights(model)}")


# -- models that grow and change ---------------------------------------------------


@pytest.mark.parallel([1, 2, 3])
def test_lazily_sized_layers(comm):
    def build(seed):
        np.random.seed(seed)
        return chainer.Sequential(L.Linear(None, 6), F.tanh, L.Linear(None, 3))

    def loss_of(model):
        return lambda x, t: F.softmax_cross_entropy(model(x), t)

    data = batches(4, 12)
    alone = build(3)
    losses = [lambda batch=batch: loss_of(alone)(*batch) for batch in data]
    actual = chainer.optimizers.MomentumSGD(0.3).setup(alone)
    train_stale(actual, alone, losses, flushes=True)
    model = build(3)
    optimizer = buffered(comm, model, chainer.optimizers.MomentumSGD(0.3))
    # Rank 0 draws what one process draws; the others draw something else.
    if comm.rank:
        np.random.seed(comm.rank)
    for batch in data:
        optimizer.update(loss_of(model), *part(comm, batch))
    optimizer.flush()
    assert_all_ranks(comm, same_on_all_ranks(comm, model))
    assert_all_ranks(comm, are_close(weights(model), weights(alone)))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("has_loss_function", [True, False])
def test_a_lazily_sized_layer_first_used_later_on_one_rank(comm, has_loss_function):
    np.random.seed(comm.rank)
    model = chainer.Chain(trunk=L.Linear(5, 4), branch=L.Linear(None, 4))
    comm.bcast_data(model)
    optimizer = buffered(comm, model, chainer.optimizers.MomentumSGD(0.1))
    x = np.full((2, 5), comm.rank + 1, "f")

    def loss(takes_branch):
        y = model.trunk(x)
        return F.mean((model.branch(y) if takes_branch else y) ** 2)

    for step in range(5):
        takes_branch = step > 1 and comm.rank == 1
        if has_loss_function:
            optimizer.update(loss, takes_branch)
        else:
            model.cleargrads()
            loss(takes_branch).backward()
            optimizer.update()
        assert_all_ranks(comm, same_on_all_ranks(comm, model), f"step {step}")
    optimizer.flush()
    ok = optimizer.t == 5 and same_on_all_ranks(comm, model)
    assert_all_ranks(comm, ok and len(weights(model)) == 4)


@pytest.mark.parallel([2])
def test_a_layer_added_while_a_gradient_is_in_flight(comm):
    np.random.seed(comm.rank)
    model = chainer.Chain(first=L.Linear(5, 5))
    optimizer = buffered(comm, model)
    x = np.full((2, 5), comm.rank + 1, "f")
    optimizer.update(lambda: F.mean(model.first(x)))
    model.add_link("second", L.Linear(5, 2))
    for parameter in model.second.params():
        parameter.update_rule = optimizer.create_update_rule()
    for _ in range(2):
        optimizer.update(lambda: F.mean(model.second(model.first(x))))
        assert_all_ranks(comm, same_on_all_ranks(comm, model))
    optimizer.flush()
    assert_all_ranks(comm, optimizer.t == 3 and same_on_all_ranks(comm, model))


@pytest.mark.parallel([1, 2])
def test_another_model_while_a_gradient_is_in_flight(comm):
    old, new = Line(), Line()
    optimizer = buffered(comm, old)
    optimizer.update(old, local(comm, 1))
    if comm.rank == 0:
        with pytest.warns(UserWarning, match=r"gradient 1 was .* never applied"):
            optimizer.setup(new)
    else:
        optimizer.setup(new)
    for k in (5, 6):
        optimizer.update(new, local(comm, k))
    optimizer.flush()
    total = mean_over_ranks(comm, 5) + mean_over_ranks(comm, 6)
    ok = np.allclose(new.w.array, -total) and (old.w.array == 0).all()
    assert_all_ranks(comm, ok and optimizer.t == 2, f"{new.w.array} {old.w.array}")


@pytest.mark.parallel([1, 2])
def test_setting_up_after_a_flush_does_not_warn(comm):
    optimizer = buffered(comm, Line())
    optimizer.update(optimizer.target, 1.0)
    optimizer.flush()
    optimizer.setup(Line())
