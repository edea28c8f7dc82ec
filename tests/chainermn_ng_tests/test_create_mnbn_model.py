"""Conversion of models, and copies and snapshots of what comes out."""

import copy
import io
import pickle

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from helpers.ranks import assert_all_ranks

from chainermn_ng.links import MultiNodeBatchNormalization, create_mnbn_model
from chainermn_ng.optimizers import create_multi_node_optimizer

N_SAMPLES = 6


def batch(shape=(3,)):
    return np.random.RandomState(0).normal(2, 3, (N_SAMPLES, *shape)).astype("f")


def part(comm, x):
    bounds = np.linspace(0, len(x), comm.size + 1).astype(int)
    return x[bounds[comm.rank] : bounds[comm.rank + 1]]


def assert_equal_to_one_process(comm, plain, converted, x):
    """Run both models in training mode and then in test mode."""
    for train in (True, False):
        with chainer.using_config("train", train):
            expected, found = plain(x).array, converted(part(comm, x)).array
        ok = np.allclose(part(comm, expected), found, atol=1e-4)
        assert_all_ranks(comm, ok, f"train={train} {expected} {found}")


def kinds(model):
    return [type(link).__name__ for _, link in sorted(model.namedlinks())]


def paths(model):
    return sorted(name for name, _ in model.namedparams())


class Block(chainer.Chain):
    """Children of all kinds, an attribute, and a forward pass of its own."""

    def __init__(self):
        super().__init__()
        self.factor = 2.0
        with self.init_scope():
            self.bn = L.BatchNormalization(3, decay=0.8)
            self.rest = chainer.ChainList(L.Linear(3, 3), L.BatchNormalization(3))
        self.also = [self.bn]

    def forward(self, x):
        return self.rest[1](self.rest[0](self.also[0](x) * self.factor))


class DerivedBlock(Block):
    """Has what it inherits, and more links."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.last = chainer.Sequential(F.tanh, Slow(3), lambda x: x + 1)

    def forward(self, x):
        return self.last(super().forward(x))


class Slow(L.BatchNormalization):
    """Only other settings."""

    def __init__(self, size):
        super().__init__(size, decay=0.99)


MODELS = {
    "link": lambda: L.BatchNormalization(3),
    "Chain": Block,
    "derived Chain": DerivedBlock,
    "ChainList": lambda: chainer.Sequential(Block(), Block()),
    "repeat": lambda: chainer.Sequential(
        L.Linear(3, 3), L.BatchNormalization(3), F.relu
    ).repeat(2, "copy"),
}


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainer#7567", "chainer/chainer#7717")
@pytest.mark.parametrize("kind", list(MODELS))
def test_structures(comm, kind):
    plain = MODELS[kind]()
    before = kinds(plain)
    converted = create_mnbn_model(plain, comm)
    ok = (
        kinds(plain) == before
        and [
            "BatchNormalization" if "Batch" in name or name == "Slow" else name
            for name in before
        ]
        == [name.replace("MultiNodeBatch", "Batch") for name in kinds(converted)]
        and paths(plain) == paths(converted)
        and not {id(p) for p in plain.params()} & {id(p) for p in converted.params()}
        and all(
            isinstance(link, MultiNodeBatchNormalization)
            for link in converted.links()
            if isinstance(link, L.BatchNormalization)
        )
    )
    assert_all_ranks(comm, ok, f"{kinds(converted)} {paths(converted)}")
    comm.bcast_data(converted)
    plain.copyparams(converted)
    assert_equal_to_one_process(comm, plain, converted, batch())


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainer#7567", "chainer/chainer#7717")
def test_a_sequential_with_functions_trains(comm):
    np.random.seed(0)
    plain = chainer.Sequential(
        L.Linear(3, 4), L.BatchNormalization(4), F.relu, L.Linear(4, 1), F.square, F.sum
    )
    model = create_mnbn_model(plain, comm)
    reference = chainer.optimizers.SGD(0.01).setup(plain)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.01), comm)
    optimizer.setup(model)
    x = batch()
    for _ in range(2):
        reference.update(lambda x: plain(x) / comm.size, x)
        optimizer.update(model, part(comm, x))
    pairs = list(zip(plain.params(), model.params(), strict=True))
    ok = all(np.allclose(a.array, b.array, atol=1e-5) for a, b in pairs)
    assert_all_ranks(comm, ok, f"{pairs}")


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainer#4266", "chainer/chainer#5786")
def test_every_option_is_carried_over(comm):
    axis = chainer.Sequential(L.BatchNormalization((3,), axis=(0, 1)))
    lazy = chainer.Sequential(
        L.BatchNormalization(
            axis=(0, 2), initial_gamma=2, initial_beta=1, initial_avg_var=4, eps=1e-3
        )
    )
    assert_equal_to_one_process(
        comm, axis, create_mnbn_model(axis, comm), batch((4, 3))
    )
    assert_equal_to_one_process(
        comm, lazy, create_mnbn_model(lazy, comm), batch((4, 3))
    )
    values = np.arange(1, 4, dtype="d")
    link = L.BatchNormalization(3, 0.7, 1e-4, "d", initial_gamma=values, use_beta=False)
    link(np.random.normal(size=(5, 3)))
    link.N = 7
    link.name = "norm"
    link.add_persistent("extra", values)
    chainer.optimizers.SGD().setup(link)
    link.disable_update()
    hook = Hook()
    link.add_hook(hook)
    found = create_mnbn_model(link, comm)
    ok = (
        (found.decay, found.eps, found.N, found.name) == (0.7, 1e-4, 7, "norm")
        and found.avg_mean.dtype == found.gamma.dtype == np.float64
        and (found.avg_mean == link.avg_mean).all()
        and (found.extra == values).all()
        and found.extra is not values
        and found.beta is None
        and (found.gamma.array == values).all()
        and not found.update_enabled
        and link.gamma.update_rule is not found.gamma.update_rule
        and found.device == link.device
        and list(found.local_link_hooks) == ["Hook"]
    )
    assert_all_ranks(comm, bool(ok), f"{vars(found)}")


class Hook(chainer.LinkHook):
    name = "Hook"


@pytest.mark.parallel([1, 2])
def test_shared_links_and_arrays_stay_shared(comm):
    bn = L.BatchNormalization(3)
    model = create_mnbn_model(chainer.Sequential(bn, F.relu, bn), comm)
    assert model[0] is model[2] is not bn
    model = create_mnbn_model(bn.repeat(2, "share"), comm)
    assert model[0] is not model[1]
    assert model[0].gamma.array is model[1].gamma.array is not bn.gamma.array
    twice = create_mnbn_model(model, comm)
    assert isinstance(twice[0], MultiNodeBatchNormalization)
    assert twice[0].comm is comm


@pytest.mark.parallel([1, 2])
def test_a_forward_pass_of_its_own_is_left_alone(comm):
    model = chainer.Sequential(L.BatchRenormalization(3), L.BatchNormalization(3))
    with pytest.warns(UserWarning, match="/0 is a BatchRenormalization"):
        found = create_mnbn_model(model, comm)
    assert type(found[0]) is L.BatchRenormalization
    assert isinstance(found[1], MultiNodeBatchNormalization)


@pytest.mark.parallel([1, 2])
def test_bad_arguments(comm):
    with pytest.raises(TypeError, match=r"expected a chainer\.Link"):
        create_mnbn_model(F.relu, comm)
    with pytest.raises(TypeError, match="create_communicator"):
        create_mnbn_model(L.Linear(3), comm.mpi_comm)
    with pytest.raises(ValueError, match="'nccl'"):
        create_mnbn_model(L.Linear(3), comm, communication_backend="ib")


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainer#5854")
@pytest.mark.parametrize("in_model", [False, True])
def test_copies(comm, in_model):
    """Each goes through a forward pass on all ranks, with statistics of its own."""
    link = MultiNodeBatchNormalization(3, comm, axis=0)
    if in_model:
        link = chainer.Sequential(link, F.tanh)
    copies = {
        "deepcopy": copy.deepcopy(link),
        "copy": link.copy("copy"),
        "init": link.copy("init"),
        "share": link.copy("share"),
        "repeat": link.repeat(2),
        "pickle": pickle.loads(pickle.dumps(link)),
        "to_cpu": link.copy("copy").to_device("@numpy"),
    }
    for name, found in copies.items():
        plain = L.BatchNormalization(3)
        plain = chainer.Sequential(plain, F.tanh) if in_model else plain
        plain = plain.repeat(2) if name == "repeat" else plain
        links = [ln for ln in found.links() if isinstance(ln, L.BatchNormalization)]
        ok = all(ln.comm is comm for ln in links)
        assert_all_ranks(comm, ok, name)
        assert_equal_to_one_process(comm, plain, found, batch())
    first = link[0] if in_model else link
    ok = (first.gamma.array == 1).all()
    other = copies["deepcopy"][0] if in_model else copies["deepcopy"]
    assert_all_ranks(comm, bool(ok and other.avg_mean is not first.avg_mean))


def saved(link):
    file = io.BytesIO()
    chainer.serializers.save_npz(file, link)
    file.seek(0)
    return file


@pytest.mark.parallel([1, 2])
def test_snapshots_of_the_plain_link_and_back(comm):
    plain = chainer.Sequential(L.BatchNormalization(3))
    plain(batch())
    plain[0].N = 3
    plain[0].gamma.array[...] = [1, 2, 3]
    for size, axis in ((3, None), (None, 0)):
        found = chainer.Sequential(MultiNodeBatchNormalization(size, comm, axis=axis))
        chainer.serializers.load_npz(saved(plain), found)
        back = chainer.Sequential(L.BatchNormalization(3))
        chainer.serializers.load_npz(saved(found), back)
        ok = all(
            np.array_equal(getattr(plain[0], name), getattr(link[0], name))
            for name in ("N", "avg_mean", "avg_var")
            for link in (found, back)
        )
        ok = ok and (back[0].gamma.array == [1, 2, 3]).all()
        assert_all_ranks(comm, bool(ok))
        assert_equal_to_one_process(comm, back, found, batch())


@pytest.mark.parallel([2, 3])
def test_lazily_sized_links_with_random_values_train(comm):
    """The ranks draw different values, and go on with those of rank 0."""
    np.random.seed(comm.rank)
    model = create_mnbn_model(
        chainer.Sequential(
            L.BatchNormalization(axis=0, initial_gamma=chainer.initializers.Normal(1)),
            L.Linear(None, 1),
            F.sum,
        ),
        comm,
    )
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.01), comm)
    optimizer.setup(model)
    x = batch()
    optimizer.update(model, part(comm, x))
    plain = L.BatchNormalization(3)
    plain(x)
    bn = model[0]
    ok = np.allclose(plain.avg_var, bn.avg_var, rtol=1e-5)
    same = comm.allgather_obj(bn.gamma.array.tobytes())
    assert_all_ranks(comm, bool(ok and len(set(same)) == 1), f"{bn.avg_var}")
