"""The walk through Chainer's graph: the gradients are Chainer's own, bit by bit."""

import gc
import warnings
import weakref

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.examples import in_step
from hypothesis import given
from hypothesis import strategies as st

from chainermn_ng.backward import (
    backward,
    can_walk,
    functions_of,
    hides_parameters,
    order_of_completion,
)

X = np.random.RandomState(0).normal(size=(4, 5)).astype("f")
T = np.array([0, 2, 1, 1], "i")


class Net(chainer.Chain):
    """Parameters of many kinds; each case uses some of them."""

    def __init__(self):
        super().__init__()
        random = np.random.RandomState(1)

        def normal(*shape):
            return random.normal(size=shape).astype("f")

        with self.init_scope():
            self.a = L.Linear(5, 5, initialW=normal(5, 5))
            self.b = L.Linear(5, 5, initialW=normal(5, 5))
            self.out = L.Linear(5, 3, initialW=normal(3, 5))
            self.w = chainer.Parameter(normal(4, 5))
            self.u = chainer.Parameter(normal(4, 5))
            self.number = chainer.Parameter(np.array(2, "f"))
            self.bn = L.BatchNormalization(5)
            self.lstm = L.LSTM(5, 5)
            self.embed = L.EmbedID(7, 5, initialW=normal(7, 5))
            self.unused = L.Linear(None, 2)
        self.lstm.upward.W.array[...] = normal(20, 5)
        self.lstm.lateral.W.array[...] = normal(20, 5)


def cross_entropy(y):
    return F.softmax_cross_entropy(y, T, enable_double_backprop=True)


def plain(m):
    return cross_entropy(m.out(F.relu(m.b(F.tanh(m.a(X))))))


def used_twice(m):
    h = m.a(m.a(F.tanh(m.b(m.a(X)))))
    return cross_entropy(m.out(h * m.w + m.w))


def shared_by_two_links(m):
    m.b.W = m.a.W
    return cross_entropy(m.out(m.b(F.tanh(m.a(X)))))


def sums_share_one_gradient(m):
    return F.sum((m.w + m.u) * X) + F.sum(m.w + m.u)


def broadcast_gradient(m):
    return F.sum(m.w) + F.sum(F.reshape(m.u, (20,)))


def branches_of_unequal_depth(m):
    h = F.tanh(m.a(X))
    deep = m.b(F.relu(m.b(F.sigmoid(m.b(h)))))
    return cross_entropy(m.out(h + deep + m.w)) + F.sum(m.w**2) * 0.1


def normalized_and_recurrent(m):
    m.lstm.reset_state()
    h = m.embed(np.array([1, 3, 3, 6], "i"))
    for _ in range(3):
        h = m.lstm(m.bn(h))
    return cross_entropy(m.out(h))


def lazy_sums(m):
    with chainer.using_config("lazy_grad_sum", True):
        return used_twice(m)


def gradient_penalty(m):
    x = chainer.Variable(X)
    y = F.sum(m.out(F.tanh(m.a(x))) ** 2)
    (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
    return F.sum(gx**2) + y + F.sum(m.w)


def forgotten(m):
    """Some parameters are seen inside and outside of what is computed twice."""
    h = F.forget(lambda x: m.b(F.tanh(m.a(x) + m.w)), F.relu(m.a(X)))
    return cross_entropy(m.out(h + m.w))


def a_branch_without_gradient(m):
    h = F.tanh(m.a(X))
    stopped = NoGradient().apply((m.b(h) * m.w,))[0]
    return cross_entropy(m.out(h + stopped + m.w))


def split_outputs(m):
    first, second, _ = F.split_axis(F.concat([m.w, m.u, m.w]), 3, axis=1)
    return F.sum(first * second)


def old_style(m):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return F.sum(OldSquare()(m.w) + OldSquare()(m.w * m.u))


def frozen_part(m):
    m.a.disable_update()
    return plain(m)


def a_leaf_that_is_the_loss(m):
    return m.number


class NoGradient(chainer.FunctionNode):
    """The identity, without a gradient."""

    def forward(self, inputs):
        return (inputs[0].copy(),)

    def backward(self, indexes, grad_outputs):
        return (None,)


class OldSquare(chainer.Function):
    """The square, as functions were written for Chainer 1."""

    def forward(self, inputs):
        return (inputs[0] ** 2,)

    def backward(self, inputs, grad_outputs):
        return (2 * inputs[0] * grad_outputs[0],)


GRAPHS = [
    plain,
    used_twice,
    shared_by_two_links,
    sums_share_one_gradient,
    broadcast_gradient,
    branches_of_unequal_depth,
    normalized_and_recurrent,
    lazy_sums,
    gradient_penalty,
    forgotten,
    a_branch_without_gradient,
    split_outputs,
    old_style,
    frozen_part,
    a_leaf_that_is_the_loss,
]


def chainers(loss, **options):
    loss.backward(**options)
    return []


def ours(loss, **options):
    told = []
    backward(loss, told.append, **options)
    return told


def bits(array):
    if array is None:
        return None
    return array.shape, array.dtype.str, array.tobytes()


def gradients(model):
    return {
        name: (bits(p.grad), p._loss_scale)
        for name, p in model.namedparams()
        if p.is_initialized
    }


def both(graph, *, begin=chainer.Link.cleargrads, n_times=1, **options):
    """Return the gradients of Chainer's walk, and of ours; and what ours told."""
    found = []
    for walk in (chainers, ours):
        model = Net()
        begin(model)
        for _ in range(n_times):
            told = walk(graph(model), **options)
        found.append(gradients(model))
    names = {id(p): name for name, p in model.namedparams()}
    return *found, [names[id(p)] for p in told]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_scale": 8.0},
        {"retain_grad": True, "n_times": 2},
        {"n_times": 3, "begin": lambda model: zero_gradients(model)},
    ],
    ids=["plain", "loss scale", "twice", "onto zeros"],
)
def test_the_gradients_are_chainers(graph, options):
    expected, found, told = both(graph, **options)
    assert found == expected
    assert len(told) == len(set(told))


def zero_gradients(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.zerograds()


@pytest.mark.parametrize("graph", [g for g in GRAPHS if g is not forgotten])
def test_double_backprop_goes_on_from_the_same_graph(graph):
    found = []
    for walk in (chainers, ours):
        model = Net()
        model.cleargrads()
        walk(graph(model), enable_double_backprop=True)
        grads = {n: p.grad_var for n, p in model.namedparams() if p.is_initialized}
        parts = [F.sum(g**2) for g in grads.values() if g is not None]
        model.cleargrads()
        total = sum(parts[1:], parts[0])
        if total.creator_node is not None and graph is not old_style:
            walk(total)
        found.append((gradients(model), [bits(part.array) for part in parts]))
    assert found[0] == found[1]


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_is_told_when_it_is_final_and_in_the_foretold_order(graph):
    model = Net()
    model.cleargrads()
    loss = graph(model)
    foretold = order_of_completion(loss)
    told, when_told = [], {}

    def note(parameter):
        told.append(parameter)
        when_told[id(parameter)] = bits(parameter.grad), parameter._loss_scale

    backward(loss, note, loss_scale=2.0)
    for parameter in told:
        assert when_told[id(parameter)] == (bits(parameter.grad), 2.0)
    if graph is a_branch_without_gradient:
        # b is not reached; it comes at the end, without a gradient, or never.
        names = {id(model.b.W), id(model.b.b)}
        foretold = [p for p in foretold if id(p) not in names]
        told = [p for p in told if id(p) not in names]
    assert {*map(id, told)} == {*map(id, foretold)}
    if graph is not a_branch_without_gradient:
        assert [*map(id, told)] == [*map(id, foretold)]


def test_a_parameter_is_told_before_the_functions_below_it_run():
    model = Net()
    model.cleargrads()
    events = []

    class Hook(chainer.FunctionHook):
        name = "note"

        def backward_preprocess(self, function, in_data, out_grads):
            events.append(function.label)

    loss = plain(model)
    with Hook():
        backward(loss, lambda p: events.append(p))
    layers = [model.out, model.b, model.a]
    labels = []
    for layer, between in zip(layers, ("ReLU", "Tanh", None), strict=True):
        labels += ["LinearFunction", layer.W, layer.b] + [between] * bool(between)
    begin = events.index("LinearFunction")
    assert [*map(_key, events[begin:])] == [*map(_key, labels)]


def _key(event):
    return event if isinstance(event, str) else id(event)


def test_what_is_hidden_holds_all_back():
    """Until the backward pass in the backward pass is over, nothing is final."""
    model = Net()
    model.cleargrads()
    events = []

    class Hook(chainer.FunctionHook):
        name = "note"

        def backward_postprocess(self, function, in_data, out_grads):
            events.append(function.label)

    loss = forgotten(model)
    with Hook():
        backward(loss, lambda p: events.append("final"))
    assert "final" not in events[: events.index("Forget")]
    assert events.count("final") == len(order_of_completion(loss)) == 5
    assert [f.label for f in functions_of(loss) if hides_parameters(f)] == ["Forget"]


def test_retained_gradients_are_chainers():
    found = []
    for walk in (chainers, ours):
        model = Net()
        model.cleargrads()
        h = F.tanh(model.a(X))
        y = model.b(h)
        loss = cross_entropy(model.out(y + h))
        walk(loss, retain_grad=True, loss_scale=3.0)
        found.append([bits(v.grad) for v in (h, y, loss)])
    assert found[0] == found[1]
    assert None not in found[0]


@pytest.mark.parametrize("is_local", [False, True])
def test_hooks_see_what_they_see_in_chainer(is_local):
    found = []
    for walk in (chainers, ours):
        seen = []

        class Hook(chainer.FunctionHook):
            name = "seen"

            def note(self, where, function, in_data, out_grads, seen=seen):
                arrays = [bits(array) for array in (*in_data, *out_grads)]
                seen.append((where, function.label, arrays))

            def backward_preprocess(self, *args):
                self.note("before", *args)

            def backward_postprocess(self, *args):
                self.note("after", *args)

        model = Net()
        model.cleargrads()
        hook = Hook()
        loss = branches_of_unequal_depth(model)
        if is_local:
            nodes = [f for f in functions_of(loss) if f.label == "LinearFunction"]
            nodes.sort(key=lambda f: f.rank)
            for node in nodes[:2]:
                node.add_hook(hook)
            walk(loss)
        else:
            with hook:
                walk(loss)
        found.append(seen)
    assert found[0] == found[1]
    assert len(found[0]) == (4 if is_local else len(found[1]))
    assert found[0]


def test_a_gradient_that_the_loss_has_is_where_it_begins():
    found = []
    for walk in (chainers, ours):
        model = Net()
        model.cleargrads()
        loss = model.out(F.tanh(model.a(X)))
        loss.grad = np.arange(12, dtype="f").reshape(4, 3)
        walk(loss, loss_scale=4.0)
        assert loss.grad is None
        found.append(gradients(model))
    assert found[0] == found[1]


def test_no_gradient_reaches_anything():
    """Without a gradient of a loss that is no number there is nothing to compute."""
    found = []
    for walk in (chainers, ours):
        model = Net()
        model.cleargrads()
        try:
            walk(model.out(model.a(X)))
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            found.append(gradients(model))
    assert found[0] == found[1]


def test_one_element_with_dimensions_is_deprecated():
    for walk in (chainers, ours):
        model = Net()
        model.cleargrads()
        loss = F.reshape(plain(model), (1,))
        with pytest.warns(DeprecationWarning, match="deprecated"):
            walk(loss)
        assert model.a.W.grad is not None


def test_errors_are_chainers():
    class Wrong(NoGradient):
        def backward(self, indexes, grad_outputs):
            return (F.sum(grad_outputs[0]),)

    class Raises(NoGradient):
        def backward(self, indexes, grad_outputs):
            raise KeyError("broken")

    for function, kind in ((Wrong, ValueError), (Raises, KeyError)):
        texts = []
        for walk in (chainers, ours):
            model = Net()
            model.cleargrads()
            with pytest.raises(kind) as caught:
                walk(F.sum(function().apply((model.w,))[0]))
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def test_debug_mode_finds_nan():
    for walk in (chainers, ours):
        model = Net()
        model.cleargrads()
        with chainer.using_config("debug", True):
            loss = F.sum(F.sqrt(model.w * 0))
            with pytest.raises(RuntimeError, match="NaN"), np.errstate(all="ignore"):
                walk(loss * 0)


def test_a_class_with_a_backward_of_its_own_is_asked():
    class Doubled(chainer.Variable):
        def backward(self, retain_grad=False, enable_double_backprop=False, scale=None):
            super().backward(retain_grad, enable_double_backprop, (scale or 1) * 2)

    model = Net()
    model.cleargrads()
    loss = Doubled(np.array(1, "f"))
    inner = F.sum(model.w)
    loss.creator_node = inner.creator_node
    loss.creator_node.outputs = (weakref.ref(loss.node),)
    assert not can_walk(loss)
    assert not can_walk(3)
    assert can_walk(inner)
    assert order_of_completion(loss) == []
    assert [*functions_of(loss)] == []
    assert ours(loss) == []
    assert (model.w.grad == 2).all()


def test_memory_is_given_back_as_the_walk_goes_on():
    """Neither gradients nor functions are held when the walk is over, nor by cycles."""
    gc.collect()
    gc.disable()
    try:
        model = Net()
        model.cleargrads()
        h = F.tanh(model.a(X))
        loss = F.sum(model.b(h) + model.w)
        functions = [weakref.ref(f) for f in functions_of(loss)]
        grads = []
        backward(loss, lambda p: grads.append(weakref.ref(p.grad)))
        del h, loss
        assert not any(reference() for reference in functions)
        assert all(reference() is not None for reference in grads)
        model.cleargrads()
        assert not any(reference() is not None for reference in grads)
    finally:
        gc.enable()


def _random_graph(leaves, operations):
    """Build a graph of small vectors from drawn numbers."""
    nodes = list(leaves)
    for kind, i, j in operations:
        x, y = nodes[i % len(nodes)], nodes[j % len(nodes)]
        if kind == 0:
            nodes.append(x + y)
        elif kind == 1:
            nodes.append(x * y)
        elif kind == 2:
            nodes.append(F.tanh(x))
        elif kind == 3:
            nodes.append(F.forget(lambda a, b: F.tanh(a - b), x, y))
        elif kind == 4:
            nodes.append(NoGradient().apply((x,))[0] + y * 0.5)
        elif kind == 5:
            first, second = F.split_axis(F.concat([x, y], axis=0), 2, axis=0)
            nodes += [first, second]
        else:
            nodes.append(F.identity(x))
    return F.sum(nodes[-1] + nodes[len(nodes) // 2])


@in_step(150)
@given(
    n_leaves=st.integers(1, 4),
    operations=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 30), st.integers(0, 30)),
        max_size=12,
    ),
    is_lazy=st.booleans(),
)
def test_random_graphs(n_leaves, operations, is_lazy):
    found = []
    for walk in (chainers, ours):
        leaves = [
            chainer.Parameter(np.linspace(-1, 1, 3).astype("f") * (i + 1))
            for i in range(n_leaves)
        ]
        for leaf in leaves:
            leaf.cleargrad()
        with chainer.using_config("lazy_grad_sum", is_lazy):
            loss = _random_graph(leaves, operations)
        foretold = order_of_completion(loss)
        when_told = {}
        if walk is chainers:
            loss.backward(loss_scale=2.0)
        else:
            backward(
                loss,
                lambda p, told=when_told: told.setdefault(id(p), bits(p.grad)),
                loss_scale=2.0,
            )
        found.append([(bits(leaf.grad), leaf._loss_scale) for leaf in leaves])
        for leaf in leaves:
            assert when_told.get(id(leaf), bits(leaf.grad)) == bits(leaf.grad)
    assert found[0] == found[1]
    if all(kind != 4 for kind, _, _ in operations):
        assert [*when_told] == [id(leaf) for leaf in foretold]
