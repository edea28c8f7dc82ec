"""Batch normalization on several ranks against one process on the joined batch."""

import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chainermn_ng.communicators import create_communicator
from chainermn_ng.links import MultiNodeBatchNormalization
from chainermn_ng.optimizers import count_first_argument, create_multi_node_optimizer
from communicators.devices.host import nccl_takes_host_memory

TOLERANCES = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-10}


def cuts(comm, n_samples, seed):
    """Return where each rank's part begins; some parts may be empty."""
    inner = np.random.RandomState(seed).randint(0, n_samples + 1, comm.size - 1)
    return [0, *sorted(inner), n_samples]


def new_pair(comm, size, **options):
    """Return the plain link and that of all ranks, with the same random values."""
    links = (
        L.BatchNormalization(size, **options),
        MultiNodeBatchNormalization(size, comm, **options),
    )
    random = np.random.RandomState(5)
    for parameters in zip(*[sorted(link.namedparams()) for link in links], strict=True):
        value = random.uniform(0.5, 1.5, parameters[0][1].shape)
        for _, parameter in parameters:
            parameter.array[...] = value
    return links


def step(link, x, gy, **arguments):
    """Run forward and backward; return what came out."""
    x = chainer.Variable(x)
    y = link(x, **arguments)
    y.grad = gy
    link.cleargrads()
    y.backward()
    return y.array, x.grad


def statistics(link):
    return link.avg_mean, link.avg_var, np.asarray(link.N)


def gradients(link):
    return [p.grad for _, p in sorted(link.namedparams())]


def compare(comm, whole, parted, x, gy, bounds, tolerance, **arguments):
    """Compare one step on all ranks with one process: all that it leaves."""
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    with warnings.catch_warnings():
        # Of a batch of one sample; the tests draw those, too.
        warnings.simplefilter("ignore", UserWarning)
        y, gx = step(whole, x, gy, **arguments)
    found = step(parted, x[mine].copy(), gy[mine].copy(), **arguments)
    pairs = list(zip((y[mine], gx[mine]), found, strict=True))
    summed = [comm.allreduce(grad) for grad in gradients(parted)]
    pairs += zip(gradients(whole), summed, strict=True)
    pairs += zip(statistics(whole), statistics(parted), strict=True)
    ok = all(
        a.dtype == b.dtype
        and np.allclose(
            a, b, rtol=tolerance, atol=tolerance * max(1, abs(a).max(initial=0))
        )
        for a, b in pairs
    )
    assert_all_ranks(comm, ok, f"{bounds} {pairs}")


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("pytorch/pytorch#22192", "pytorch/pytorch#36688")
def test_uneven_batches(comm):
    """Rank 0 has 6 samples, the others share 2."""
    random = np.random.RandomState(0)
    x, gy = random.normal(3, 2, (2, 8, 4, 3)).astype("f")
    whole, parted = new_pair(comm, 4)
    bounds = [0, *np.linspace(6, 8, comm.size).astype(int)]
    for _ in range(3):
        compare(comm, whole, parted, x, gy, bounds, 1e-5)


@pytest.mark.parallel([1, 2, 3])
@settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    n_samples=st.integers(2, 9),
    axis=st.sampled_from([None, 0, (0, 1), (0, 2), (0, 1, 2), (0, 2, 3), (0, 3)]),
    dtype=st.sampled_from(sorted(TOLERANCES)),
    seed=st.integers(0, 1000),
    finetune=st.booleans(),
)
def test_any_shape_axis_and_split(comm, shape, n_samples, axis, dtype, seed, finetune):
    # Chainer's own knows no statistics without dimensions.
    if np.max(axis or 0) > len(shape) or np.size(axis) > len(shape):
        axis = None
    random = np.random.RandomState(seed)
    x, gy = random.normal(1, 2, (2, n_samples, *shape)).astype(dtype)
    reduced = (0, *range(2, x.ndim)) if axis is None else np.atleast_1d(axis)
    size = tuple(n for i, n in enumerate(x.shape) if i not in reduced)
    # The plain link computes its statistics in half precision, if all is of it.
    of_link = "float32" if dtype == "float16" else dtype
    whole, parted = new_pair(comm, size, axis=axis, dtype=of_link, decay=0.7)
    for i in range(2):
        bounds = cuts(comm, n_samples, seed + i)
        compare(
            comm, whole, parted, x, gy, bounds, TOLERANCES[dtype] * 5, finetune=finetune
        )


@pytest.mark.parallel([2, 3])
@pytest.mark.reports(
    "chainer/chainer#879", "chainer/chainer#4742", "chainer/chainermn#203"
)
def test_running_statistics_from_the_first_step(comm):
    x = np.random.RandomState(0).normal(2, 3, (8, 4)).astype("f")
    whole, parted = L.BatchNormalization(4), MultiNodeBatchNormalization(4, comm)
    bounds = cuts(comm, 8, 3)
    mine = x[bounds[comm.rank] : bounds[comm.rank + 1]]
    for _ in range(2):
        with chainer.using_config("train", False):
            same = np.allclose(whole(x).array, parted(x).array, atol=1e-5)
        assert_all_ranks(comm, same, "outputs in test mode")
        whole(x)
        parted(mine)
        ok = np.allclose(whole.avg_mean, parted.avg_mean, atol=1e-6)
        ok = ok and np.allclose(whole.avg_var, parted.avg_var, rtol=1e-5)
        assert_all_ranks(comm, ok, f"{statistics(whole)} {statistics(parted)}")


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(("mean", "dtype"), [(1e4, "f"), (1e8, "d"), (500, "e")])
def test_a_large_mean_costs_no_digits(comm, mean, dtype):
    x = np.random.RandomState(0).normal(mean, 1, (64, 3)).astype(dtype)
    exact = x.astype("d")
    link = MultiNodeBatchNormalization(3, comm, dtype="f" if dtype == "e" else dtype)
    bounds = cuts(comm, 64, 1)
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    y = link(x[mine]).array
    expected = (exact - exact.mean(axis=0)) / np.sqrt(exact.var(axis=0) + link.eps)
    # The mean itself has no more digits than the dtype of computation.
    atol = 2e-3 if dtype == "e" else 4 * mean * np.finfo(dtype).eps
    ok = y.dtype == x.dtype and np.allclose(y, expected[mine], atol=atol)
    unbiased = exact.var(axis=0, ddof=1)
    ok = ok and np.allclose(link.avg_var, 0.9 + 0.1 * unbiased, rtol=1e-4)
    assert_all_ranks(comm, bool(ok), f"{y} {expected[mine]} {link.avg_var}")


@pytest.mark.parallel([2, 3])
def test_half_precision_everywhere_has_statistics_in_float32(comm):
    """In half precision the sum of squares would be infinite."""
    x = np.random.RandomState(0).normal(0, 200, (32, 2, 8)).astype("e")
    link = MultiNodeBatchNormalization(2, comm, dtype="e")
    y = link(x[comm.rank :: comm.size])
    exact = x.astype("d")
    std = exact.std(axis=(0, 2), keepdims=True)
    expected = (exact - exact.mean(axis=(0, 2), keepdims=True)) / std
    ok = y.dtype == np.float16 == link.avg_var.dtype
    ok = ok and np.allclose(y.array, expected[comm.rank :: comm.size], atol=5e-3)
    assert_all_ranks(comm, bool(ok), f"{y}")


@pytest.mark.parallel([2, 3])
def test_no_samples_at_all_change_nothing(comm):
    link = MultiNodeBatchNormalization(3, comm)
    y, gx = step(link, np.zeros((0, 3), "f"), np.zeros((0, 3), "f"))
    ok = y.shape == gx.shape == (0, 3) and (link.gamma.grad == 0).all()
    ok = ok and (link.avg_mean == 0).all() and (link.avg_var == 1).all()
    assert_all_ranks(comm, bool(ok))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(
    "options", [{"use_gamma": False}, {"use_beta": False}, {"initial_avg_var": 0}]
)
def test_options(comm, options):
    x, gy = np.random.RandomState(0).normal(1, 2, (2, 7, 3)).astype("f")
    whole, parted = new_pair(comm, 3, eps=1e-3, decay=0.5, **options)
    compare(comm, whole, parted, x, gy, cuts(comm, 7, 0), 1e-5)


@pytest.mark.parallel([2, 3])
def test_fine_tuning_begins_anew(comm):
    x, gy = np.random.RandomState(0).normal(1, 2, (2, 7, 3)).astype("f")
    whole, parted = new_pair(comm, 3)
    for _ in range(2):
        for link in (whole, parted):
            link.start_finetuning()
        for i in range(3):
            compare(
                comm, whole, parted, x * i, gy, cuts(comm, 7, i), 1e-5, finetune=True
            )


@pytest.mark.parallel([2, 3])
def test_size_from_the_first_batch(comm):
    x, gy = np.random.RandomState(0).normal(1, 2, (2, 7, 3, 2)).astype("f")
    links = (
        L.BatchNormalization(axis=(0, 2)),
        MultiNodeBatchNormalization(None, comm, axis=(0, 2)),
    )
    assert "size=None" in str(links[1])
    # On rank 0 from an empty batch.
    bounds = [0, *np.linspace(0, 7, comm.size).astype(int)]
    compare(comm, *links, x, gy, bounds, 1e-5)
    assert "size=(3,)" in str(links[1])


@pytest.mark.parallel([2, 3])
def test_second_derivatives(comm):
    """Those of a gradient penalty, by numbers and against one process."""
    random = np.random.RandomState(0)
    x, gy, ggx = random.normal(0, 1, (3, 6, 2, 3))
    whole, parted = new_pair(comm, 2, dtype="d")
    bounds = cuts(comm, 6, 2)

    def second(link, part):
        values = [chainer.Variable(v[part]) for v in (x, gy, ggx)]
        y = link(values[0])
        first = chainer.grad(
            [y],
            [values[0], link.gamma, link.beta],
            [values[1]],
            enable_double_backprop=True,
        )
        loss = F.sum(values[2] * first[0] ** 2)
        # Sums over the ranks' parts, linear in them: the same total as in one process.
        loss += F.sum(first[1] * np.array([1.0, 2])) + F.sum(first[2] * 3)
        return chainer.grad([loss], [values[0], link.gamma, values[1]])

    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    expected = second(whole, slice(None))
    found = second(parted, mine)
    pairs = [(expected[i].array[mine], found[i].array) for i in (0, 2)]
    pairs.append((expected[1].array, comm.allreduce(found[1].array)))
    assert_all_ranks(comm, all(np.allclose(*pair) for pair in pairs), f"{pairs}")


@pytest.mark.parallel([2, 3])
def test_gradients_by_numbers(comm):
    """Of the sum of all ranks' losses, by what one rank alone may change."""
    x = np.random.RandomState(comm.rank).normal(1, 2, (comm.rank + 1, 2))
    gy = np.random.RandomState(7 + comm.rank).normal(0, 1, x.shape)
    link = new_pair(comm, 2, dtype="d")[1]
    _, gx = step(link, x, gy)
    arrays = [x, link.gamma.array, link.beta.array]
    found = [gx, link.gamma.grad, link.beta.grad]
    places = [(i, k) for i, array in enumerate(arrays) for k in range(array.size)]
    for owner in range(comm.size):
        for i, k in comm.bcast_obj(places, root=owner):
            losses = []
            for shift in (1e-4, -2e-4, 1e-4):
                if comm.rank == owner:
                    arrays[i].reshape(-1)[k] += shift
                losses.append(comm.allreduce(np.sum(gy * link(x).array)))
            number = (losses[0] - losses[1]) / 2e-4
            ok = comm.rank != owner or abs(number - found[i].reshape(-1)[k]) < 1e-6
            assert_all_ranks(comm, bool(ok), f"{number} {found[i]} {k}")


@pytest.mark.parallel(3)
def test_two_communicators_in_one_model(comm):
    """One layer over all ranks, one over those of equal colour."""
    some = comm.split(0 if comm.rank < 2 else 1, comm.rank)
    x = np.random.RandomState(0).normal(1, 2, (6, 2)).astype("f")
    model = chainer.Sequential(
        MultiNodeBatchNormalization(2, comm),
        F.square,
        MultiNodeBatchNormalization(2, some),
    )
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    y = model(x[mine])
    squares = np.square((x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 2e-5))
    here = squares[:4] if comm.rank < 2 else squares[4:]
    expected = (squares[mine] - here.mean(axis=0)) / np.sqrt(here.var(axis=0) + 2e-5)
    F.sum(y**3).backward()
    assert_all_ranks(comm, np.allclose(y.array, expected, atol=1e-4), f"{y} {expected}")
    some.finalize()


class Classifier(chainer.Chain):
    """Weights before and after the normalization."""

    def __init__(self, normalization):
        super().__init__()
        random = np.random.RandomState(0)
        with self.init_scope():
            self.l1 = L.Linear(5, 4, initialW=random.normal(size=(4, 5)))
            self.bn = normalization
            self.l2 = L.Linear(4, 3, initialW=random.normal(size=(3, 4)))

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.l2(F.tanh(self.bn(self.l1(x)))), t)


@pytest.mark.parallel([2, 3])
def test_training_on_uneven_batches_equals_one_process(comm):
    """Also where a rank has no sample at a step."""
    random = np.random.RandomState(1)
    n_steps, n_samples = 6, 9
    plain = Classifier(L.BatchNormalization(4))
    reference = chainer.optimizers.MomentumSGD(0.1).setup(plain)
    model = Classifier(MultiNodeBatchNormalization(4, comm))
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, count_samples=count_first_argument
    ).setup(model)
    for i in range(n_steps):
        x = random.normal(size=(n_samples, 5)).astype("f")
        t = random.randint(0, 3, n_samples).astype("i")
        bounds = cuts(comm, n_samples, i)
        if i == 2:
            bounds = [0] * comm.size + [n_samples]
        mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
        reference.update(plain, x, t)
        optimizer.update(model, x[mine], t[mine])
    pairs = list(zip(plain.params(), model.params(), strict=True))
    ok = all(np.allclose(a.array, b.array, atol=2e-5) for a, b in pairs)
    ok = ok and np.allclose(plain.bn.avg_var, model.bn.avg_var, rtol=1e-4)
    assert_all_ranks(comm, ok, f"{pairs}")


@pytest.mark.parallel([2, 3])
def test_a_loop_of_ones_own_weighs_the_loss_itself(comm):
    """Counting comes too late there, of which the optimizer warns."""
    x = np.random.RandomState(1).normal(size=(7, 5)).astype("f")
    t = np.arange(7, dtype="i") % 3
    bounds = [0, *np.linspace(5, 7, comm.size).astype(int)]
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    plain = Classifier(L.BatchNormalization(4))
    chainer.optimizers.SGD(0.1).setup(plain).update(plain, x, t)
    model = Classifier(MultiNodeBatchNormalization(4, comm))
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    model.cleargrads()
    (model(x[mine], t[mine]) * (len(x[mine]) * comm.size / 7)).backward()
    optimizer.update()
    pairs = list(zip(plain.params(), model.params(), strict=True))
    ok = all(np.allclose(a.array, b.array, atol=1e-5) for a, b in pairs)
    assert_all_ranks(comm, ok, f"{pairs}")
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, count_samples=count_first_argument
    ).setup(model)
    model.cleargrads()
    model(x[mine], t[mine]).backward()
    with pytest.warns(UserWarning, match="differ in length"):
        optimizer.update(None, x[mine], t[mine])


@pytest.mark.parallel([2, 3])
def test_one_ranks_mistake_is_an_error_on_all(comm):
    link = MultiNodeBatchNormalization(3, comm)
    wrong = comm.size - 1
    x = np.zeros((2, 4 if comm.rank == wrong else 3), "f")
    assert_all_raise(comm, lambda: link(x), Exception, "gamma has (3,)")
    x = np.zeros((2, 3), "i" if comm.rank == wrong else "f")
    assert_all_raise(comm, lambda: link(x), Exception, "expected floating numbers")
    sizes = MultiNodeBatchNormalization(3 + (comm.rank == wrong), comm)
    x = np.zeros((2, *sizes.avg_mean.shape), "f")
    assert_all_raise(comm, lambda: sizes(x), Exception, f"rank {wrong}")


@pytest.mark.parallel([2, 3])
def test_a_rank_that_skips_the_layer_is_an_error_on_all(comm):
    link = MultiNodeBatchNormalization(3, comm)
    x = chainer.Variable(np.ones((2, 3), "f"))

    def forward():
        if comm.rank == 0:
            comm.barrier()
        else:
            link(x)

    assert_all_raise(comm, forward, Exception, "different operations")


@pytest.mark.parallel([1, 2])
def test_bad_arguments(comm):
    with pytest.raises(TypeError, match="create_communicator"):
        MultiNodeBatchNormalization(3, comm.engine)
    with pytest.raises(ValueError, match="'auto', 'mpi', 'nccl'"):
        MultiNodeBatchNormalization(3, comm, communication_backend="gloo")
    with (
        create_communicator("non_cuda_aware", timeout_s=30) as no_nccl,
        pytest.raises(ValueError, match="no NCCL"),
    ):
        MultiNodeBatchNormalization(3, no_nccl, communication_backend="nccl")
    by_nccl = MultiNodeBatchNormalization(3, comm, communication_backend="nccl")
    x = np.zeros((2, 3), "f")
    if not nccl_takes_host_memory():
        assert_all_raise(comm, lambda: by_nccl(x), TypeError, "is a NumPy array")
    with pytest.raises(RuntimeError, match="size or axis"):
        MultiNodeBatchNormalization(None, comm)
    link = MultiNodeBatchNormalization(3, comm, axis=(1, 0))
    assert_all_raise(comm, lambda: link(np.zeros((2, 3), "f")), ValueError, "ascending")


@pytest.mark.parallel([2, 3])
def test_a_rank_whose_input_needs_no_gradient(comm):
    """Takes part in the backward pass all the same."""
    x, gy = np.random.RandomState(0).normal(1, 2, (2, 6, 3)).astype("f")
    whole, parted = new_pair(comm, 3)
    _, gx = step(whole, x, gy)
    bounds = np.linspace(0, 6, comm.size + 1).astype(int)
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    part = chainer.Variable(x[mine], requires_grad=comm.rank > 0)
    parted.cleargrads()
    y = parted(part)
    y.grad = gy[mine]
    y.backward()
    ok = (
        part.grad is None
        if comm.rank == 0
        else np.allclose(part.grad, gx[mine], atol=1e-5)
    )
    ok = ok and np.allclose(
        comm.allreduce(parted.gamma.grad), whole.gamma.grad, atol=1e-5
    )
    assert_all_ranks(comm, bool(ok))


@pytest.mark.parallel([2, 3])
def test_a_rank_without_a_backward_pass_is_an_error_on_all(comm):
    link = MultiNodeBatchNormalization(3, comm)
    loss = F.sum(link(np.random.RandomState(comm.rank).normal(size=(2, 3)).astype("f")))

    def backward():
        link.cleargrads()
        if comm.rank > 0:
            loss.backward()
        comm.multi_node_mean_grad(link)

    assert_all_raise(comm, backward, Exception, "different operations")
    # What it can do instead.
    link.cleargrads()
    (loss * (comm.rank > 0)).backward()
    comm.multi_node_mean_grad(link)
    assert_all_ranks(comm, np.allclose(link.beta.grad, 2 * (comm.size - 1) / comm.size))


@pytest.mark.parallel([2, 3])
def test_recomputing_does_not_count_twice(comm):
    x, gy = np.random.RandomState(0).normal(1, 2, (2, 7, 3)).astype("f")
    whole, parted = new_pair(comm, 3)
    forget = lambda x, **kwargs: F.forget(lambda x: parted(x, **kwargs), x)  # noqa: E731
    forget.cleargrads, forget.namedparams = parted.cleargrads, parted.namedparams
    bounds = cuts(comm, 7, 2)
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    expected = step(whole, x, gy)
    found = step(forget, x[mine], gy[mine])
    ok = all(
        np.allclose(a[mine], b, atol=1e-5) for a, b in zip(expected, found, strict=True)
    )
    ok = ok and np.allclose(whole.avg_var, parted.avg_var, rtol=1e-5)
    assert_all_ranks(comm, ok, f"{expected} {found}")


@pytest.mark.parallel([1, 2])
def test_test_mode_sends_nothing(comm):
    link = MultiNodeBatchNormalization(3, comm)
    before = comm.sent_bytes
    with chainer.using_config("train", False):
        # Ranks may evaluate different numbers of batches.
        for _ in range(comm.rank + 1):
            link(np.ones((2, 3), "f"))
    assert_all_ranks(comm, comm.sent_bytes == before)
