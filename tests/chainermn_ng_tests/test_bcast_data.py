import chainer
import chainer.links as L
import numpy as np
import pytest
from helpers.chainer_models import same_on_all_ranks
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

from communicators import MismatchError


def seeded_link(comm, **shapes):
    link = chainer.Link()
    with link.init_scope():
        for name, array in shapes.items():
            setattr(link, name, chainer.Parameter(array))
    return link


@pytest.mark.reports("pytorch/pytorch#79043")
@pytest.mark.parallel([1, 2, 3])
def test_all_ranks_get_the_roots_weights_in_any_layout_and_dtype(comm):
    value = comm.rank + 1.0
    link = seeded_link(
        comm,
        c=np.full((2, 3), value, "f"),
        fortran=np.asfortranarray(np.full((2, 3), value)),
        half=np.full(3, value, np.float16),
        sliced=np.full((4, 6), value, "f")[::2, ::3],
    )
    root = comm.size - 1
    comm.bcast_data(link, root=root)
    for name, parameter in link.namedparams():
        ok = (parameter.array == root + 1).all()
        assert_all_ranks(comm, bool(ok), f"{name}: {parameter.array!r}")
    assert link.fortran.array.flags.f_contiguous
    assert link.half.dtype == np.float16


@pytest.mark.parallel([2, 3])
def test_older_name(comm):
    link = seeded_link(comm, w=np.full(2, comm.rank, "f"))
    comm.broadcast_data(link)
    assert_all_ranks(comm, (link.w.array == 0).all())


@pytest.mark.parallel([2, 3])
def test_persistent_values_come_along(comm):
    model = chainer.Chain(bn=L.BatchNormalization(3))
    model.bn.avg_mean += comm.rank + 1
    statistics = model.bn.avg_mean
    model.bn.N = comm.rank + 5
    model.add_persistent("words", None if comm.rank == 0 else "from 1")
    comm.bcast_data(model)
    ok = (statistics == 1).all() and model.bn.N == 5 and model.words == "from 1"
    assert_all_ranks(comm, bool(ok), f"{statistics} {model.bn.N} {model.words}")


@pytest.mark.parallel([2, 3])
def test_a_parameter_with_a_shape_on_one_rank_gets_it_on_all(comm):
    model = chainer.Chain(lazy=L.Linear(None, 2), other=L.Linear(None, 2))
    if comm.rank == 1:
        model.lazy.W.initialize((2, 4))
    comm.bcast_data(model)
    ok = model.lazy.W.shape == (2, 4) and model.other.W.array is None
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, model))


@pytest.mark.parallel([2, 3])
def test_other_models_are_an_error_on_all_ranks(comm):
    odd = comm.rank == 1
    model = chainer.Chain(fc=L.Linear(3, 4 if odd else 2))
    assert_all_raise(
        comm,
        lambda: comm.bcast_data(model),
        MismatchError,
        "/fc/W",
        "(4, 3) float32 on rank 1",
        "(2, 3) float32 on rank 0",
    )
    model = chainer.Chain(**{"b" if odd else "a": L.Linear(3, 2)})
    assert_all_raise(comm, lambda: comm.bcast_data(model), MismatchError, "/a/W")
    model = chainer.Chain()
    if odd:
        model.add_persistent("extra", 1)
    assert_all_raise(comm, lambda: comm.bcast_data(model), MismatchError, "/extra")


@pytest.mark.parallel([2, 3])
def test_another_root_on_one_rank_is_an_error_on_all(comm):
    model = chainer.Chain(fc=L.Linear(3, 2))
    root = int(comm.rank == 1)
    assert_all_raise(comm, lambda: comm.bcast_data(model, root=root), MismatchError)
    assert_all_raise(comm, lambda: comm.bcast_data(model, root=99), ValueError, "99")
