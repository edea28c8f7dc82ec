"""Gradients through communication equal those of one process on all the data."""

import chainer
import numpy as np
import pytest
from helpers.examples import in_step, of_rank_0, shapes
from helpers.joined import CASES, inputs, joined_gradient, shared_gradient
from helpers.ranks import assert_all_ranks
from hypothesis import given
from hypothesis import strategies as st

from chainermn_ng import functions

parallel = pytest.mark.parallel([1, 2, 3])
several = pytest.mark.parallel([2, 3])
SHAPES = [(), (3,), (0,), (3, 0)]


def weightings(size):
    """Yield whose outputs are used: all, one rank's, the first or the last of each."""
    full = [[1.0 + r + 0.5 * k for k in range(size)] for r in range(size)]
    yield "all", full
    for only in range(size):
        yield (
            f"rank {only}",
            [row if r == only else [None] * size for r, row in enumerate(full)],
        )
    yield "first", [[row[0], *[None] * (size - 1)] for row in full]
    yield "last", [[*[None] * (size - 1), row[-1]] for row in full]


def check(comm, name, shape, root, weights, dtype, what):
    case = CASES[name]
    xs = inputs(case, comm.size, shape, seed=3)
    expected = joined_gradient(case, xs, comm.rank, root, weights)
    got = shared_gradient(comm, case, xs[comm.rank].astype(dtype), root, weights)
    if got is None and name == "send_recv" and not expected.any():
        # A rank that only passes on or returns what it got does not use its input.
        got = np.zeros(expected.shape, dtype)
    tolerance = 2e-2 if dtype == "f2" else 1e-5
    ok = (
        isinstance(got, np.ndarray)
        and got.dtype == dtype
        and got.shape == xs[0].shape
        and np.allclose(got, expected, rtol=tolerance, atol=tolerance)
    )
    assert_all_ranks(comm, ok, f"{name} {what} {shape}: {got}, expected {expected}")


@parallel
@pytest.mark.reports(
    "chainer/chainer#5474", "horovod/horovod#2687", "chainer/chainermn#258"
)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_numerical_ones_of_joined_data(comm, name):
    for number, (what, weights) in enumerate(weightings(comm.size)):
        for shape in SHAPES:
            root = number % comm.size
            check(comm, name, shape, root, weights, "f8", f"{what}, root {root}")


@parallel
@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("name", CASES)
def test_dtypes_are_kept(comm, name, dtype):
    weights = [[1.0] * comm.size for _ in range(comm.size)]
    check(comm, name, (2, 3), comm.size - 1, weights, dtype, dtype)


@parallel
@pytest.mark.parametrize("name", CASES)
@in_step(15)
@given(
    shape=shapes(2),
    root=st.integers(0, 5),
    used=st.lists(st.booleans(), min_size=9, max_size=9),
    dtype=st.sampled_from(["f2", "f4", "f8"]),
)
def test_gradients_of_random_losses(comm, name, shape, root, used, dtype):
    size = comm.size
    shape, root, used, dtype = of_rank_0(comm, shape, root, used, dtype)
    weights = [
        [1.0 + k - r if used[3 * r + k] else None for k in range(size)]
        for r in range(size)
    ]
    check(comm, name, shape, root % size, weights, dtype, f"{used} {dtype}")


@several
@pytest.mark.parametrize("function", ["allgather", "bcast", "allreduce"])
def test_float16_is_summed_in_float32(comm, function):
    """On three ranks the sum overflows half precision on the way."""
    x = chainer.Variable(np.zeros(2, "f2"))
    if function == "allgather":
        y = functions.allgather(comm, x)[0]
    else:
        y = getattr(functions, function)(comm, x)
    y.grad = np.full(2, -60000 if comm.rank == comm.size - 1 else 60000, "f2")
    total = sum(g[0].astype("f8") for g in comm.allgather(y.grad))
    y.backward()
    is_reached = function == "allreduce" or comm.rank == 0
    ok = x.grad.dtype == "f2" and np.allclose(x.grad, total if is_reached else 0)
    assert_all_ranks(comm, ok, f"{x.grad} {total}")


@several
@pytest.mark.reports(
    "chainer/chainermn#258", "chainer/chainermn#234", "pytorch/pytorch#40702"
)
def test_a_loss_normalised_by_the_count_of_all_ranks(comm):
    """As in detection: the sum over all ranks, by the weights of all ranks."""
    random = np.random.RandomState(0)
    data = random.rand(comm.size, 4).astype("f8")
    w = chainer.Variable(np.array(0.7))
    loss = chainer.functions.sum(chainer.functions.tanh(w * data[comm.rank]))
    weight = chainer.functions.sum(chainer.functions.sigmoid(w * data[comm.rank]))
    total = functions.allreduce(comm, weight)
    (loss / total).backward()
    mine = comm.allreduce(w.grad)

    v = chainer.Variable(np.array(0.7))
    whole = chainer.functions.sum(chainer.functions.tanh(v * data))
    (whole / chainer.functions.sum(chainer.functions.sigmoid(v * data))).backward()
    assert_all_ranks(comm, np.allclose(mine, v.grad), f"{mine} {v.grad}")


@several
def test_ranks_that_hold_the_same_maximum_each_get_the_gradient(comm):
    x = chainer.Variable(np.array([1.0, comm.rank, 0.0 if comm.rank else np.nan]))
    y = functions.allreduce(comm, x, "max")
    y.grad = np.ones(3)
    y.backward()
    expected = np.array([1, comm.rank == comm.size - 1, 0]) * comm.size
    ok = np.array_equal(x.grad, expected) and np.isnan(y.array[2])
    assert_all_ranks(comm, ok, f"{x.grad} {y.array}")


@several
@pytest.mark.reports("horovod/horovod#2687")
def test_one_output_of_allgather_is_used(comm):
    x = chainer.Variable(np.ones(2, "f"))
    chainer.functions.sum(functions.allgather(comm, x)[0]).backward()
    expected = comm.size if comm.rank == 0 else 0
    assert_all_ranks(comm, (x.grad == expected).all(), f"{x.grad}")


@several
@pytest.mark.reports("chainer/chainer#5474")
def test_a_scalar_is_broadcast(comm):
    x = chainer.Variable(np.array(2, "f")) if comm.rank == 0 else None
    y = functions.bcast(comm, x)
    (y * (comm.rank + 1)).backward()
    expected = comm.size * (comm.size + 1) / 2
    ok = y.shape == () and (comm.rank > 0 or float(x.grad) == expected)
    assert_all_ranks(comm, ok, f"{y}")


@several
@pytest.mark.parametrize("name", sorted(set(CASES) - {"send_recv"}))
def test_ranks_whose_input_needs_no_gradient(comm, name):
    """Backward completes on all ranks, whoever needs a gradient."""
    case = CASES[name]
    xs = inputs(case, comm.size, (2,), seed=1)
    grads = []
    for needing in range(comm.size + 1):
        x = xs[comm.rank]
        if comm.rank == needing:
            x = chainer.Variable(x)
        outputs, delegate = case.shared(comm, x, 0)
        start = outputs[0] if outputs else delegate
        start.grad = np.ones_like(start.array)
        start.backward()
        grads.append(comm.rank != needing or x.grad is not None)
    assert_all_ranks(comm, all(grads), f"{grads}")


@several
@pytest.mark.parametrize("function", ["bcast", "scatter"])
def test_what_a_rank_that_is_not_the_root_gives_is_connected(comm, function):
    """Its graph is reached on all ranks, or the root would wait for it."""
    x = chainer.Variable(np.arange(comm.size, dtype="f"))
    h = functions.allreduce(comm, x * x)
    y = getattr(functions, function)(comm, h, root=1)
    y.grad = np.ones_like(y.array)
    y.backward()
    n_uses = comm.size if function == "bcast" else 1
    ok = np.array_equal(x.grad, 2 * x.array * n_uses)
    assert_all_ranks(comm, ok, f"{x.grad}")


@several
def test_backward_passes_run_in_the_reverse_order_on_all_ranks(comm):
    """Also where the same calls stand at other depths of the ranks' graphs."""
    a = chainer.Variable(np.full(2, 1.0 + comm.rank))
    b = chainer.Variable(np.full(2, 2.0 + comm.rank))
    deep = a
    for _ in range(3 * (comm.rank == 0)):
        deep = chainer.functions.identity(deep)
    first = functions.allreduce(comm, deep)
    other = b
    for _ in range(5 * (comm.rank == 1)):
        other = chainer.functions.identity(other)
    second = functions.allreduce(comm, other, "mean")
    third = functions.allgather(comm, a)[0]
    chainer.functions.sum(first + 10 * second + third).backward()
    grad_a = comm.size + (comm.size if comm.rank == 0 else 0)
    ok = (a.grad == grad_a).all() and (b.grad == 10).all()
    assert_all_ranks(comm, ok, f"{a.grad} {b.grad}")


@several
def test_the_same_variable_several_times_and_two_backward_passes(comm):
    x = chainer.Variable(np.ones(2))
    y = functions.allreduce(comm, functions.allreduce(comm, x) * x)
    for _ in range(2):
        chainer.functions.sum(y).backward()
    # y = size * sum(x) * x summed over ranks; each rank's loss counts.
    expected = 2 * comm.size * 2 * comm.size
    assert_all_ranks(comm, np.allclose(x.grad, expected), f"{x.grad}")


@parallel
def test_without_a_graph_nothing_is_kept(comm):
    x = chainer.Variable(np.ones(2, "f"))
    with chainer.no_backprop_mode():
        ys = [
            functions.allreduce(comm, x),
            functions.bcast(comm, x),
            functions.allgather(comm, x)[0],
        ]
    ok = all(y.creator_node is None for y in ys) and (ys[0].array == comm.size).all()
    assert_all_ranks(comm, ok, f"{ys}")


@parallel
def test_one_rank_gives_a_tuple_too(comm):
    x = chainer.Variable(np.ones(2, "f"))
    gathered = functions.gather(comm, x)
    for got in (
        functions.allgather(comm, x),
        functions.alltoall(comm, [x] * comm.size),
        gathered if comm.rank == 0 else (x,) * comm.size,
    ):
        ok = isinstance(got, tuple) and len(got) == comm.size
        assert_all_ranks(comm, ok, f"{got}")


@parallel
def test_pseudo_connect_passes_data_and_gradients(comm):
    d, x, y = (chainer.Variable(np.full(n, 2.0, "f")) for n in (1, 2, 3))
    a, b = functions.pseudo_connect(d, x, y)
    chainer.functions.sum(b * b).backward()
    ok = (a.array == 2).all() and d.grad == [0] and (y.grad == 4).all()
    (c,) = functions.pseudo_connect(None, np.ones(2, "f"))
    with pytest.raises(ValueError, match="one or more"):
        functions.pseudo_connect(d)
    assert_all_ranks(comm, ok and not c.requires_grad, f"{d.grad} {y.grad}")
