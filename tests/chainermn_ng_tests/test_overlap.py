"""Gradients that travel during the backward pass: the same bits, groups and errors."""

import copy
import logging
import warnings

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
from helpers.deep_models import SMALL_GROUPS, Deep, bits, trained
from helpers.errors import assert_all_raise
from helpers.jobs import run_job
from helpers.ranks import assert_all_ranks, same_everywhere

import communicators
from chainermn_ng.communicators import create_communicator
from chainermn_ng.links import MultiNodeBatchNormalization
from chainermn_ng.optimizers import (
    count_first_argument,
    create_multi_node_optimizer,
    overlap_plan,
)
from chainermn_ng.optimizers.gradient_groups import (
    cut_into_groups,
    default_overlap_bytes,
    own_gradient,
)
from chainermn_ng.optimizers.overlap_plan import Told, common_order
from communicators import CommunicatorError, MismatchError, UnavailableError

DATA = batches(3, 12)
MANY = 8  # groups of Deep's gradients with SMALL_GROUPS


def agreements(comm):
    """Return how many collectives the ranks have begun: in front, in the background."""
    background = _background(comm)
    return comm.engine._agreement.sequence, background.engine._agreement.sequence


def _background(comm):
    return comm.background("of the test")


# -- the same result ---------------------------------------------------------------


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("naive", {}),
        ("flat", {"bucket_bytes": 100, "allreduce_grad_dtype": "float16"}),
        ("multi_ring", {}),
        ("two_dimensional", {"topology": "pretended"}),
        ("auto", {"topology": "pretended"}),
    ],
)
def test_not_a_bit_differs(name, options):
    with create_communicator("naive") as comm:
        size = comm.size
    if options.get("topology"):
        # Each rank a host.
        options = {"topology": f"{size}x1"}
    with create_communicator(name, timeout_s=30, **options) as comm:
        found = {}
        for overlap in (True, False, "auto"):
            hooks = [optimizer_hooks.WeightDecay(0.01)]
            hooks.append(optimizer_hooks.GradientClipping(1.0))
            optimizer = trained(comm, DATA, hooks=hooks, overlap=overlap)
            found[overlap] = bits(optimizer)
        ok = found[True] == found[False] == found["auto"]
        ok = ok and same_on_all_ranks(comm, optimizer.target)
        assert_all_ranks(comm, ok, f"{found}")
        alone = Deep(0)
        actual = chainer.optimizers.MomentumSGD(0.05).setup(alone)
        actual.add_hook(optimizer_hooks.WeightDecay(0.01))
        actual.add_hook(optimizer_hooks.GradientClipping(1.0))
        for batch in DATA:
            actual.update(alone, *batch)
        tolerance = 2e-2 if options.get("allreduce_grad_dtype") else 1e-4
        ok = are_close(weights(optimizer.target), weights(alone), atol=tolerance)
        assert_all_ranks(comm, ok, f"{weights(optimizer.target)} {weights(alone)}")


class Normalized(Deep):
    """Meets the other ranks in forward and backward pass."""

    def __init__(self, comm, seed=0):
        super().__init__(seed)
        with self.init_scope():
            self.bn1 = MultiNodeBatchNormalization(8, comm)
            self.bn2 = MultiNodeBatchNormalization(8, comm)

    def forward(self, x, t):
        h = F.relu(self.bn1(self.l1(x)))
        h = self.bn2(self.l2(h))
        return F.softmax_cross_entropy(self.top(h), t)


def with_penalty(model):
    def loss(x, t):
        x = chainer.Variable(x)
        y = model.top(F.tanh(model.l2(F.tanh(model.l1(x)))))
        (gx,) = chainer.grad([F.sum(y**2)], [x], enable_double_backprop=True)
        return F.mean(gx**2) + F.mean(y**2)

    return loss


def with_forget(model):
    def loss(x, t):
        h = F.forget(lambda x: F.tanh(model.l2(model.l1(x) + model.v[None])), x)
        return F.softmax_cross_entropy(model.top(h), t)

    return loss


def with_rare_parts(comm, model):
    """Some parameters have a gradient on one rank only: each step on another one."""
    step = iter(range(100))

    def loss(x, t):
        h = F.tanh(model.l1(x))
        if next(step) % comm.size == comm.rank:
            h = F.tanh(model.l2(h))
        else:
            h = h + F.sum(model.unused)
        return F.softmax_cross_entropy(model.top(h), t)

    return loss


def zero_grads(actual):
    actual.use_cleargrads(False)
    return actual


def dynamic_scale(actual):
    actual.loss_scaling(scale=64.0)
    return actual


CASES = {
    "lazy": lambda comm: {"model": Deep(comm.rank, is_lazy=True)},
    "penalty": lambda comm: _with_loss(with_penalty),
    "forget": lambda comm: _with_loss(with_forget),
    "rare": lambda comm: _with_loss(lambda model: with_rare_parts(comm, model)),
    "rare, no zeros": lambda comm: {
        **_with_loss(lambda model: with_rare_parts(comm, model)),
        "zero_fill": False,
    },
    "zerograds": lambda comm: {"actual": zero_grads(chainer.optimizers.SGD(0.05))},
    "loss scale": lambda comm: {"actual": dynamic_scale(chainer.optimizers.Adam())},
    "joint statistics": lambda comm: {"model": Normalized(comm, comm.rank)},
}


def _with_loss(make):
    model = Deep(0)
    return {"model": model, "loss": make(model)}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", list(CASES))
def test_not_a_bit_differs_in_unusual_steps(comm, case):
    found = []
    for overlap in (True, False):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*grad", DeprecationWarning)
            optimizer = trained(comm, DATA, overlap=overlap, **CASES[case](comm))
        found.append(bits(optimizer))
    ok = found[0] == found[1] and optimizer.t == len(DATA)
    ok = ok and same_on_all_ranks(comm, optimizer.target)
    assert_all_ranks(comm, ok, f"{found}")


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("kind", ["plain", "joint statistics"])
def test_ranks_with_few_samples_or_none(comm, kind):
    """Rank 0 runs out of samples in the second step; the sum is weighted."""
    x, t = DATA[0]
    found = []
    for overlap in (True, False):
        model = Deep(0) if kind == "plain" else Normalized(comm)
        optimizer = create_multi_node_optimizer(
            chainer.optimizers.SGD(0.05),
            comm,
            count_samples=count_first_argument,
            overlap=overlap,
            overlap_bytes=SMALL_GROUPS,
        ).setup(model)
        for empty in (comm.size - 1, 0, None):
            n = 0 if comm.rank == empty else comm.rank + 2
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.update(model, x[:n], t[:n])
        found.append(bits(optimizer))
    finite = all(np.isfinite(p.array).all() for p in model.params())
    ok = found[0] == found[1] and finite and same_on_all_ranks(comm, model)
    assert_all_ranks(comm, ok, f"{found}")


@pytest.mark.parallel([2])
def test_gradients_that_are_there_already_travel_as_ever(comm):
    """Without a loss function there is nothing to overlap with, and no thread."""
    found = []
    for overlap in (True, False):
        optimizer = trained(comm, DATA[:0], model=Deep(0), overlap=overlap)
        for batch in DATA:
            optimizer.target.cleargrads()
            for x, t in zip(*(np.split(a, 2) for a in part(comm, batch)), strict=True):
                optimizer.target(x, t).backward()
            optimizer.update()
        found.append(bits(optimizer))
    assert_all_ranks(comm, found[0] == found[1] and comm._background is None)


@pytest.mark.parallel([2])
def test_the_weights_are_compared_in_debug_mode(monkeypatch):
    monkeypatch.setenv("CHAINERMN_NG_DEBUG", "1")
    with create_communicator("flat", timeout_s=30) as comm:
        found = [bits(trained(comm, DATA, overlap=o)) for o in (True, False)]
        assert_all_ranks(comm, found[0] == found[1])


# -- when and how often ------------------------------------------------------------


class AtTheBottom(chainer.FunctionHook):
    """Calls a function before the backward pass of the deepest layer."""

    name = "at the bottom"

    def __init__(self, model, call):
        self._weight, self._call = model.l1.W, call

    def backward_preprocess(self, function, in_data, out_grads):
        if any(x is self._weight.node for x in function.inputs):
            self._call()


@pytest.mark.parallel([2, 3])
def test_groups_have_arrived_before_the_backward_pass_ends(comm):
    optimizer = trained(comm, DATA[:1], overlap=True)
    model, seen = optimizer.target, []

    def look():
        _background(comm).wait_in_flight()
        seen.append({name: p.grad for name, p in model.namedparams()})
        seen.append({k: g.copy() for k, g in seen[0].items() if g is not None})

    with AtTheBottom(model, look):
        optimizer.update(model, *part(comm, DATA[1]))
    arrays, then = seen
    final = {name: p.grad for name, p in model.namedparams()}
    early = [k for k, g in then.items() if (g == final[k]).all()]
    # All above the first layer but those that share the last groups with it.
    ok = {"/l5/W", "/l5/b", "/l3/W", "/l4/b", "/l3/b", "/v"} <= set(early)
    ok = ok and not {"/l1/W", "/l1/b"} & set(then)
    # In place, each in memory of its own: what is averaged is no copy.
    ok = ok and all(arrays[k] is final[k] for k in early)
    assert_all_ranks(comm, ok, f"{early}")


@pytest.mark.parallel([2, 3])
def test_what_the_backward_pass_still_reads_is_not_averaged(comm):
    """The gradient of a sum is that of both its inputs: one array, read once more."""
    found = []
    for overlap in (True, False):
        model = Deep(0)
        with model.init_scope():
            model.shift = chainer.Parameter(np.zeros((12 // comm.size, 8), "f"))

        def loss(x, t, model=model):
            return F.softmax_cross_entropy(model.l5(model.l1(x) + model.shift), t)

        options = {"overlap": overlap, "overlap_bytes": 1}
        with AtTheBottom(model, lambda: _background(comm).wait_in_flight()):
            optimizer = trained(comm, DATA, model=model, loss=loss, **options)
        found.append(bits(optimizer))
    assert_all_ranks(comm, found[0] == found[1], f"{found}")


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_collectives_of_a_step(comm, overlap):
    """The ranks meet once for the step, and once for each group in the background."""
    optimizer = trained(comm, DATA[:2], overlap=overlap)
    before = agreements(comm)
    optimizer.update(optimizer.target, *part(comm, DATA[2]))
    counts = [b - a for a, b in zip(before, agreements(comm), strict=True)]
    assert_all_ranks(comm, counts == ([1, MANY] if overlap else [1, 0]))


@pytest.mark.parallel([2])
def test_a_small_model_is_averaged_at_once(comm):
    optimizer = trained(comm, DATA[:2], overlap=True, overlap_bytes=1 << 20)
    before = comm.engine._agreement.sequence
    optimizer.update(optimizer.target, *part(comm, DATA[2]))
    ok = comm.engine._agreement.sequence - before == 1 and comm._background is None
    assert_all_ranks(comm, ok)


@pytest.mark.parallel([2, 3])
def test_the_order_is_that_of_the_lowest_rank_with_a_graph(comm):
    """Rank 0 has no samples, the others use their layers in unlike orders."""
    model = Deep(0)
    layers = [model.l2, model.l3]

    def loss(x, t):
        h = F.tanh(model.l1(x))
        for layer in layers if comm.rank == 1 else layers[::-1]:
            h = F.tanh(layer(h))
        return F.softmax_cross_entropy(model.l5(h), t)

    x, t = part(comm, DATA[0])
    n = len(x) if comm.rank else 0
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1),
        comm,
        count_samples=count_first_argument,
        overlap=True,
        overlap_bytes=1,
    ).setup(model)
    optimizer.update(loss, x[:n], t[:n])
    order = [name for group in optimizer._planner._plan.groups for name in group]
    ok = order[:6] == ["/l5/W", "/l5/b", "/l3/W", "/l3/b", "/l2/W", "/l2/b"]
    ok = ok and order[6:8] == ["/l1/W", "/l1/b"]
    assert_all_ranks(comm, ok and same_everywhere(comm, order), f"{order}")
    assert_all_ranks(comm, same_on_all_ranks(comm, model))


@pytest.mark.parametrize(
    ("nbytes", "overlap_bytes", "groups"),
    [
        ([], 16, []),
        ([1000], 16, [[0]]),
        ([1, 2, 2, 2], 16, [[0, 1], [2, 3]]),
        (
            [2, 2] * 8,
            16,
            [[0, 1], [2, 3, 4, 5], [6, 7], [8, 9], [10, 11, 12, 13], [14, 15]],
        ),
        # In the middle what is left of both halves.
        ([2] * 12, 8, [[0], [1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11]]),
        ([0, 100, 0, 100], 16, [[0, 1, 2], [3]]),
        # A bias goes with the weights beside it.
        ([100, 1, 100, 1, 100, 1, 100, 1], 128, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([3, 3, 3], 1, [[0], [1], [2]]),
    ],
)
def test_groups_grow_from_both_ends(nbytes, overlap_bytes, groups):
    found = cut_into_groups(nbytes, overlap_bytes)
    assert [i for group in found for i in group] == [*range(len(nbytes))]
    assert found == groups


@pytest.mark.parametrize(
    "nbytes",
    [
        [4 * 256 * 256, 4 * 256] * 500,
        [8192] * 2000,
        [4 << 20] * 8 + [8192] * 3000,
        [3, 0, 1 << 20] * 50,
    ],
)
def test_groups_are_hardly_larger_than_their_limit(nbytes):
    limit = default_overlap_bytes(sum(nbytes))
    groups = cut_into_groups(nbytes, limit)
    assert [i for group in groups for i in group] == [*range(len(nbytes))]
    for group in groups:
        assert sum(nbytes[i] for i in group) <= max(limit, max(nbytes)) * 33 / 32
    assert sum(nbytes[i] for i in groups[-1]) <= max(limit / 4, max(nbytes)) * 33 / 32


def test_a_gradient_is_copied_only_where_somebody_else_has_it():
    """Views of memory that nobody else has, such as of a convolution, are not."""
    base = np.zeros(6, "f")
    parameter = chainer.Parameter(np.zeros((2, 3), "f"))
    for make, is_copied in [
        (lambda: np.zeros((2, 3), "f"), False),
        (lambda: np.zeros((3, 2), "f").T, False),
        (lambda: base.reshape(2, 3), True),
        (lambda: np.broadcast_to(np.zeros(3, "f"), (2, 3)), True),
    ]:
        parameter.grad_var = chainer.Variable(make())
        address = parameter.grad.ctypes.data
        assert (own_gradient(parameter).ctypes.data != address) == is_copied
    held = chainer.Variable(np.zeros((2, 3), "f"))
    parameter.grad_var = held
    assert own_gradient(parameter) is not held.array
    parameter.cleargrad()
    assert own_gradient(parameter) is None


# -- mistakes ----------------------------------------------------------------------


@pytest.mark.parallel([2, 3])
def test_a_difference_is_found_before_anything_is_averaged(comm):
    optimizer = trained(comm, DATA[:2], overlap=True)
    before = weights(optimizer.target)
    batch = part(comm, DATA[2])
    optimizer.lr = 0.05 + 0.1 * comm.rank
    step = lambda: optimizer.update(optimizer.target, *batch)  # noqa: E731
    assert_all_raise(comm, step, MismatchError, "lr=0.05", "lr=0.15")
    after = weights(optimizer.target)
    ok = all((after[k] == before[k]).all() for k in before)
    optimizer.lr = 0.05
    step()
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, optimizer.target))


class Broken(chainer.FunctionNode):
    """The identity; its backward pass fails if it is told to."""

    def __init__(self, error):
        self._error = error

    def forward(self, inputs):
        return (inputs[0].copy(),)

    def backward(self, indexes, grad_outputs):
        if self._error is not None:
            raise self._error
        return grad_outputs


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("where", ["top", "bottom"])
def test_an_error_in_one_ranks_backward_pass_is_one_of_all(comm, where):
    optimizer = trained(comm, DATA[:2], overlap=True)
    model, before = optimizer.target, weights(optimizer.target)
    errors = iter([KeyError("wanted") if comm.rank == 1 else None] + [None] * 9)

    def loss(x, t):
        x = Broken(next(errors)).apply((F.tanh(model.l1(x)),))[0]
        if where == "bottom":
            return F.softmax_cross_entropy(model.top(model.l2(x)), t)
        y = model.top(model.l2(F.tanh(model.l1(np.zeros((1, 5), "f")))))
        return F.sum(y) + F.sum(x)

    step = lambda: optimizer.update(loss, *part(comm, DATA[2]))  # noqa: E731
    assert_all_raise(comm, step, (KeyError, CommunicatorError), "wanted")
    ok = all((v == before[k]).all() for k, v in weights(model).items())
    ok = ok and all(p.grad is None for p in model.params()) and optimizer.t == 2
    step()
    ok = ok and optimizer.t == 3 and same_on_all_ranks(comm, model)
    assert_all_ranks(comm, ok)


class Nested(Broken):
    """Adds a parameter that the graph does not show, by a pass of its own."""

    def __init__(self, parameter):
        super().__init__(None)
        self._parameter = parameter

    def backward(self, indexes, grad_outputs):
        with chainer.force_backprop_mode():
            F.sum(self._parameter).backward()
        return grad_outputs


@pytest.mark.parallel([2])
def test_a_gradient_that_changes_after_it_was_final(comm):
    """On one rank; all raise, and take the next step together."""
    optimizer = trained(comm, DATA[:2], overlap=True)
    model = optimizer.target
    kinds = iter([comm.rank, 0, 0])

    def loss(x, t):
        x = F.tanh(model.l1(x))
        if next(kinds):
            x = Nested(model.l5.b).apply((x,))[0]
        return F.softmax_cross_entropy(model.top(model.l2(x)), t)

    step = lambda: optimizer.update(loss, *part(comm, DATA[2]))  # noqa: E731
    assert_all_raise(
        comm, step, (RuntimeError, CommunicatorError), "/l5/b was changed", "overlap"
    )
    step()
    assert_all_ranks(comm, optimizer.t == 3 and same_on_all_ranks(comm, model))


@pytest.mark.parallel([2])
def test_a_function_can_say_that_it_hides_parameters(comm, monkeypatch):
    monkeypatch.setattr(Nested, "hides_parameters", True, raising=False)
    found = []
    for overlap in (True, False):
        model = Deep(0)

        def loss(x, t, model=model):
            x = Nested(model.l5.b).apply((F.tanh(model.l1(x)),))[0]
            return F.softmax_cross_entropy(model.top(model.l2(x)), t)

        found.append(bits(trained(comm, DATA, overlap=overlap, model=model, loss=loss)))
    assert_all_ranks(comm, found[0] == found[1])


@pytest.mark.parallel([2])
def test_ranks_with_other_settings(comm):
    overlap = comm.rank == 0
    batch = part(comm, DATA[0])
    optimizer = trained(comm, DATA[:0], overlap=overlap)
    step = lambda: optimizer.update(optimizer.target, *batch)  # noqa: E731
    assert_all_raise(comm, step, MismatchError, "overlap=True", "overlap=False")


@pytest.mark.parallel([1, 2])
def test_bad_arguments(comm):
    sgd = chainer.optimizers.SGD(0.1)
    for options, text in [
        ({"overlap": "yes"}, "'auto', True or False"),
        ({"overlap": 1}, "'auto', True or False"),
        ({"overlap_bytes": 0}, "None, or 1 or more"),
        ({"overlap": True, "double_buffering": True}, "exclude each other"),
    ]:
        with pytest.raises(ValueError, match=text):
            create_multi_node_optimizer(sgd, comm, **options)


@pytest.mark.parallel([2])
def test_mpi_without_threads(comm, monkeypatch, caplog):
    """Asked for, it is an error on all ranks; by default it is off, and says why."""
    kind = communicators.CommunicatorBase
    monkeypatch.setattr(kind, "thread_level", "serialized")
    step = lambda: trained(comm, DATA, overlap=True)  # noqa: E731
    assert_all_raise(comm, step, UnavailableError, "MPI_THREAD_SERIALIZED")
    monkeypatch.setattr(kind, "inter_size", 2)
    with caplog.at_level(logging.INFO, "chainermn_ng"):
        optimizer = trained(comm, DATA)
    texts = [r.getMessage() for r in caplog.records if "groups" in r.getMessage()]
    expected = f"in {MANY} groups, after the backward pass (MPI was started with"
    ok = len(texts) == (comm.rank == 0) and all(expected in text for text in texts)
    assert_all_ranks(comm, ok and comm._background is None, f"{texts}")
    assert_all_ranks(comm, same_on_all_ranks(comm, optimizer.target))


def told(**changes):
    usual = {
        "order": None,
        "thread_level": "multiple",
        "by_nccl": False,
        "is_collective": False,
        "host": 0,
        "cores": 0b1111,
    }
    return Told(**{**usual, **changes})


@pytest.mark.parametrize(
    ("table", "n_groups", "n_hosts", "reason"),
    [
        ([told(), told()], 3, 1, None),
        ([told(), told()], 1, 1, "one group"),
        ([told(cores=0b11)] * 2, 3, 1, "2 ranks of one host on 2 cores"),
        ([told(cores=0b11), told(cores=0b1100)], 3, 1, None),
        ([told(cores=0b11)] * 2, 3, 2, None),
        ([told(by_nccl=True)] * 2, 3, 2, "not been run on a GPU"),
        ([told(by_nccl=True, is_collective=True), told(by_nccl=True)], 3, 1, "NCCL"),
        ([told(is_collective=True)] * 2, 3, 2, None),
        ([told(thread_level="funneled"), told()], 3, 2, "FUNNELED"),
    ],
)
def test_where_it_is_off_by_default(table, n_groups, n_hosts, reason):
    found = overlap_plan.reason_against(table, n_groups, n_hosts)
    assert found is None if reason is None else reason in found


def test_the_order_that_all_ranks_take():
    assert common_order([told(), told(order=(2, 0)), told(order=(0, 2))], 4) == [
        2, 0, 1, 3,
    ]  # fmt: skip
    assert common_order([told()], 2) == [0, 1]


@pytest.mark.parallel([2])
def test_another_model_has_another_plan(comm):
    model = Deep(0)
    optimizer = trained(comm, DATA[:1], model=model, overlap=True)
    plan = optimizer._planner._plan
    assert len(plan.groups) == MANY
    if comm.rank == 0:
        # A copy's model is no matter of the original.
        copy.copy(optimizer).setup(MLP())
    assert optimizer._planner._plan is plan
    optimizer.setup(model)
    optimizer.update(model, *part(comm, DATA[1]))
    assert_all_ranks(comm, optimizer._planner._plan == plan)
    optimizer.setup(L.Classifier(L.Linear(5, 300)))
    for batch in DATA[1:3]:
        optimizer.update(optimizer.target, *part(comm, batch))
    ok = optimizer._planner._plan.names == ("/predictor/W", "/predictor/b")
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, optimizer.target))


# -- whole programs ----------------------------------------------------------------


PROGRAM = r"""
import sys, threading
import numpy as np
import chainermn_ng, chainer
import chainer.functions as F
import chainer.links as L

class Broken(chainer.FunctionNode):
    def forward(self, inputs):
        return (inputs[0].copy(),)
    def backward(self, indexes, grads):
        if comm.rank == 1 and optimizer.t == 2 and "backward" in sys.argv:
            raise KeyError("wanted")
        return grads

def loss(x, t):
    if comm.rank == 1 and optimizer.t == 2 and "exit" in sys.argv:
        sys.exit(0)
    h = Broken().apply((model[0](x),))[0]
    return F.softmax_cross_entropy(model[2](model[1](h)), t)

comm = chainermn_ng.create_communicator("flat", timeout_s=20)
model = chainer.Sequential(L.Linear(2, 9), L.Linear(9, 9), L.Linear(9, 2))
optimizer = chainermn_ng.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.1), comm, overlap=True, overlap_bytes=64
).setup(model)
for _ in range(4):
    optimizer.update(loss, np.ones((1, 2), "f"), np.zeros(1, "i"))
sys.stdout.write(f"trained {threading.active_count()}\n")
"""


@pytest.mark.parametrize("failure", ["none", "backward", "exit"])
def test_how_a_program_ends(failure):
    """When rank 1 fails in its third step, or leaves: soon, and the others know why."""
    job = run_job(2, ["-c", PROGRAM, failure], timeout_s=60)
    assert job.seconds < 30
    if failure == "none":
        assert job.returncode == 0, job.output
        assert job.stdout.count("trained 2") == 2, job.output
        return
    assert job.returncode != 0, job.output
    assert job.stdout == "", job.output
    why = "rank 1: leaving the program" if failure == "exit" else "wanted"
    assert why in job.stderr, job.output
