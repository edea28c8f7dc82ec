import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.chainer_models import MLP, batches
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

import communicators
from chainermn_ng.communicators import create_communicator
from communicators import MismatchError

# All but the one that sends nothing.
REAL = [n for n in communicators.available_communicators() if n != "dummy"]


def link_of(**arrays):
    link = chainer.Link()
    with link.init_scope():
        for name, array in arrays.items():
            setattr(link, name, chainer.Parameter(array))
    link.cleargrads()
    return link


def mean_of_ranks(comm):
    return (comm.size + 1) / 2


@pytest.mark.reports(
    "NVIDIA/Megatron-LM#5337", "pytorch/pytorch#47163", "chainer/chainermn#213"
)
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", REAL)
def test_mean_is_right_for_each_layout_and_dtype(name):
    with create_communicator(name) as comm:
        values = np.arange(12.0).reshape(3, 4)
        link = link_of(
            c=values.astype("f"),
            fortran=np.asfortranarray(values),
            half=values.astype(np.float16),
            sliced=values.astype("f"),
            empty=np.zeros((0, 3), "f"),
            scalar=np.array(1.0, "f"),
        )
        grads = {
            "c": np.full((3, 4), comm.rank + 1, "f"),
            "fortran": np.asfortranarray(np.full((3, 4), comm.rank + 1, "d")),
            "half": np.full((3, 4), comm.rank + 1, np.float16),
            "sliced": np.full((6, 8), comm.rank + 1, "f")[::2, ::2],
            "empty": np.zeros((0, 3), "f"),
            "scalar": np.array(comm.rank + 1, "f"),
        }
        for key, grad in grads.items():
            getattr(link, key).grad = grad
        comm.multi_node_mean_grad(link)
        expected = mean_of_ranks(comm)
        for key, grad in grads.items():
            found = getattr(link, key).grad
            ok = found.dtype == grad.dtype and np.allclose(found, expected)
            assert_all_ranks(comm, bool(ok), f"{key}: {found!r}")


@pytest.mark.reports("horovod/horovod#1699", "horovod/horovod#278")
@pytest.mark.parallel([2, 3, 4])
def test_large_half_precision_gradients_stay_finite(comm):
    link = link_of(w=np.zeros(3, np.float16))
    link.w.grad = np.full(3, 40000, np.float16)
    comm.multi_node_mean_grad(link)
    assert_all_ranks(comm, np.allclose(link.w.grad, 40000), f"{link.w.grad!r}")


@pytest.mark.reports("chainer/chainer#6759", "chainer/chainer#6133")
@pytest.mark.parallel([2, 3, 4])
def test_a_gradient_missing_on_some_ranks_counts_as_zero(comm):
    link = link_of(a=np.zeros(2, "f"), b=np.zeros((2, 2), "f"), unused=np.zeros(2))
    link.a.grad = np.ones(2, "f")
    if comm.rank == 0:
        link.b.grad = np.ones((2, 2), "f")
    comm.multi_node_mean_grad(link)
    ok = (
        (link.a.grad == 1).all()
        and link.b.grad is not None
        and np.allclose(link.b.grad, 1 / comm.size)
        and link.unused.grad is None
    )
    assert_all_ranks(comm, bool(ok), f"{link.b.grad!r} {link.unused.grad!r}")
    link.cleargrads()
    comm.multi_node_mean_grad(link, zero_fill=True)
    assert_all_ranks(comm, all((p.grad == 0).all() for p in link.params()))


@pytest.mark.parallel([2, 3])
def test_shared_parameters_are_reduced_once(comm):
    shared = L.Linear(2, 2)
    model = chainer.Chain(first=shared, second=chainer.Chain(inner=shared))
    model.cleargrads()
    for parameter in shared.params():
        parameter.grad = np.full(parameter.shape, comm.rank + 1, "f")
    comm.multi_node_mean_grad(model)
    ok = all((p.grad == mean_of_ranks(comm)).all() for p in shared.params())
    assert_all_ranks(comm, ok)


@pytest.mark.parallel([2, 3])
def test_parameters_whose_gradients_are_one_array(comm):
    # The sum's backward pass hands the same array to both; here only on rank 0.
    link = link_of(a=np.zeros(3, "f"), b=np.zeros(3, "f"))
    if comm.rank == 0:
        F.sum((link.a + link.b) * np.ones(3, "f")).backward()
        assert link.a.grad is link.b.grad
    else:
        link.a.grad = np.full(3, 2, "f")
        link.b.grad = np.full(3, 5, "f")
    comm.multi_node_mean_grad(link)
    n_others = comm.size - 1
    ok = np.allclose(link.a.grad, (1 + 2 * n_others) / comm.size) and np.allclose(
        link.b.grad, (1 + 5 * n_others) / comm.size
    )
    assert_all_ranks(comm, ok, f"{link.a.grad} {link.b.grad}")


@pytest.mark.parallel([2, 3])
def test_read_only_gradients_of_a_reduction(comm):
    link = link_of(w=np.zeros((2, 3), "f"))
    (F.sum(link.w) * (comm.rank + 1)).backward()
    comm.multi_node_mean_grad(link)
    assert_all_ranks(comm, np.allclose(link.w.grad, mean_of_ranks(comm)))


@pytest.mark.parallel([2, 3])
def test_filled_gradients_have_the_loss_scale_of_the_others(comm):
    link = link_of(a=np.zeros(2, "f"), b=np.zeros(2, "f"))
    loss = F.sum(link.a * 1.0)
    if comm.rank == 0:
        loss = loss + F.sum(link.b * 1.0)
    loss.backward(loss_scale=64.0)
    comm.multi_node_mean_grad(link)
    ok = link.a._loss_scale == link.b._loss_scale == 64.0
    ok = ok and np.allclose(link.b.grad, 64 / comm.size)
    assert_all_ranks(comm, ok, f"{link.b._loss_scale} {link.b.grad}")
    # Without any gradient of its own a rank has to be told.
    link = link_of(a=np.zeros(2, "f"))
    if comm.rank == 0:
        F.sum(link.a * 1.0).backward(loss_scale=64.0)
    comm.multi_node_mean_grad(link, loss_scale=64.0)
    assert_all_ranks(comm, link.a._loss_scale == 64.0)


@pytest.mark.parallel([2, 3])
def test_shares_weigh_the_ranks(comm):
    link = link_of(w=np.zeros(2, np.float16))
    link.w.grad = np.full(2, np.nan if comm.rank == 0 else comm.rank, np.float16)
    share = 0.0 if comm.rank == 0 else 1 / (comm.size - 1)
    comm.multi_node_mean_grad(link, share=share)
    expected = np.mean(np.arange(1, comm.size))
    ok = np.allclose(link.w.grad, expected) and link.w.grad.dtype == np.float16
    assert_all_ranks(comm, bool(ok), f"{link.w.grad}")


@pytest.mark.parallel([2, 3])
def test_other_shapes_on_one_rank_are_an_error_on_all(comm):
    link = chainer.Chain(fc=L.Linear(3, 2 if comm.rank else 4))
    for parameter in link.params():
        parameter.grad = np.ones(parameter.shape, "f")
    assert_all_raise(
        comm,
        lambda: comm.multi_node_mean_grad(link),
        MismatchError,
        "/fc/W",
        "(4, 3)",
        "(2, 3)",
        "rank 0",
    )
    assert_all_ranks(comm, (link.fc.W.grad == 1).all())


@pytest.mark.parallel([2, 3])
def test_a_parameter_without_shape_on_some_ranks_is_named(comm):
    link = chainer.Chain(a=L.Linear(2, 2), lazy=L.Linear(None, 2))
    link.cleargrads()
    comm.multi_node_mean_grad(link)
    if comm.rank == 1:
        link.lazy.W.initialize((2, 3))
    assert_all_raise(
        comm,
        lambda: comm.multi_node_mean_grad(link),
        MismatchError,
        "/lazy/W",
        "rank 1",
    )


@pytest.mark.parallel([2, 3])
def test_equal_models_are_not_mixed_up(comm):
    first, second = MLP(), MLP()
    for model in (first, second):
        model.cleargrads()
        comm.multi_node_mean_grad(model)
    chosen = first if comm.rank == 0 else second
    assert_all_raise(
        comm,
        lambda: comm.multi_node_mean_grad(chosen),
        MismatchError,
        "model 0",
        "model 1",
    )


@pytest.mark.parallel(2)
def test_allreduce_grad_is_the_deprecated_name(comm):
    model = MLP()
    model.cleargrads()
    model(*batches(1, 4, seed=comm.rank)[0]).backward()
    before = comm.allgather_obj(model.l1.W.grad)
    with pytest.warns(DeprecationWarning, match="multi_node_mean_grad"):
        comm.allreduce_grad(model)
    assert_all_ranks(comm, np.allclose(model.l1.W.grad, np.mean(before, axis=0)))


@pytest.mark.parallel(2)
def test_a_gradient_that_cannot_be_read_is_an_error_on_all(comm):
    link = link_of(w=np.zeros(2, "f"))
    if comm.rank == 1:
        link.w = chainer.Parameter()
        with link.init_scope():
            link.w = chainer.Parameter()
        link.w.array = np.zeros(2, "f")
    assert_all_raise(
        comm,
        lambda: comm.multi_node_mean_grad(link),
        communicators.CommunicatorError,
        "rank 1",
    )
