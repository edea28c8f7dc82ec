import warnings

import chainer
import numpy as np
import pytest
from chainer import datasets
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.datasets import (
    DataSizeError,
    create_empty_dataset,
    get_epoch_trigger,
    get_n_iterations_for_one_epoch,
    padding_mask,
    scatter_dataset,
    scatter_index,
)
from chainermn_ng.datasets.cutting import cut, is_in_memory
from communicators import MismatchError


def union_without_padding(comm, shard):
    own = [shard[i] for i in range(len(shard) - shard.n_padding)]
    return sorted(x for part in comm.allgather_obj(own) for x in part)


@pytest.mark.reports(
    "chainer/chainermn#274",
    "chainer/chainer#8267",
    "pytorch/pytorch#25162",
    "pytorch/pytorch#22584",
)
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("n_samples", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_the_shards_together_are_the_data_set(comm, n_samples, shuffle, equal):
    root = comm.size - 1
    data = list(range(10, 10 + n_samples)) if comm.rank == root else None
    shard = scatter_dataset(
        data, comm, root=root, shuffle=shuffle, seed=4, force_equal_length=equal
    )
    found = union_without_padding(comm, shard)
    assert_all_ranks(comm, found == list(range(10, 10 + n_samples)), f"{found}")
    lengths = comm.allgather_obj(len(shard))
    assert max(lengths) - min(lengths) <= (0 if equal else 1)
    assert (shard.n_padding == 0) or equal
    ok = [x - 10 for x in shard] == shard.indices.tolist()
    assert_all_ranks(comm, ok, f"{list(shard)} {shard.indices}")


@pytest.mark.parallel([2, 3])
def test_a_seed_decides_on_the_order(comm):
    data = np.arange(20)
    kwargs = {"shuffle": True, "force_equal_length": False}
    shards = [scatter_dataset(data, comm, seed=s, **kwargs) for s in (1, 1, 2, None)]
    indices = [comm.allgather_obj(shard.indices.tolist()) for shard in shards]
    assert indices[0] == indices[1] != indices[2]
    assert indices[0] != [list(part) for part in np.array_split(data, comm.size)]


@pytest.mark.parallel([1, 2, 3])
def test_kinds_of_data_sets_keep_their_samples(comm):
    x = np.arange(14.0).reshape(7, 2)
    t = list("abcdefg")
    kinds = [
        x,
        tuple(t),
        datasets.TupleDataset(x, t),
        datasets.DictDataset(x=x, t=t),
        datasets.ConcatenatedDataset(t[:3], t[3:]),
        datasets.SubDataset(t, 1, 6),
        datasets.SubDataset(datasets.TupleDataset(x, t), 1, 6, [6, 5, 4, 3, 2, 1, 0]),
        datasets.TransformDataset(datasets.TupleDataset(t, x), first_of),
    ]
    for data in kinds:
        assert is_in_memory(data)
        shard = scatter_dataset(data, comm)
        ok = all(
            repr(shard[i]) == repr(data[index]) for i, index in enumerate(shard.indices)
        )
        assert_all_ranks(comm, ok, f"{type(data)} {list(shard)}")
    assert repr(shard[-1]) == repr(data[shard.indices[-1]])
    assert [repr(s) for s in shard[0:2]] == [repr(shard[0]), repr(shard[1])]


def first_of(sample):
    return sample[0]


class CountingSample:
    """Counts how many times the samples of this process were pickled."""

    n_pickled = 0

    def __init__(self, number):
        self.number = number

    def __getstate__(self):
        type(self).n_pickled += 1
        return self.__dict__


@pytest.mark.reports(
    "chainer/chainermn#208", "masayoshi-ogura/HDNNP#181", "chainer/chainer#7544"
)
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("transformed", [False, True])
def test_only_the_shard_travels(comm, transformed):
    CountingSample.n_pickled = 0
    n_samples = 12
    data = None
    if comm.rank == 0:
        data = [CountingSample(i) for i in range(n_samples)]
        if transformed:
            data = datasets.TransformDataset(data, first_number)
    before = comm.sent_bytes["messages"]
    shard = scatter_dataset(data, comm)
    n_others = n_samples - n_samples // comm.size
    n_pickled = CountingSample.n_pickled
    assert_all_ranks(comm, n_pickled == (n_others if comm.rank == 0 else 0))
    assert len(shard) == len(shard._base) == n_samples // comm.size
    # An array of 1 MB: the root sends each other rank its part, nobody more.
    before = comm.sent_bytes["messages"]
    array = np.zeros((1000, 125)) if comm.rank == 0 else None
    shard = scatter_dataset(array, comm)
    sent = comm.sent_bytes["messages"] - before
    limit = 1e6 * (comm.size - 1) / comm.size + 30_000 if comm.rank == 0 else 10_000
    assert_all_ranks(comm, sent < limit, f"{sent} bytes")
    assert shard._base.nbytes <= 1e6 / comm.size + 1000


def first_number(sample):
    return sample.number


class LazyDataset(chainer.dataset.DatasetMixin):
    """Makes a sample when asked, anew each time, and counts."""

    def __init__(self, n_samples):
        self.n_samples = n_samples
        self.n_made = 0

    def __len__(self):
        return self.n_samples

    def get_example(self, i):
        self.n_made += 1
        return i * i


@pytest.mark.parallel([1, 2, 3])
def test_lazy_data_sets_travel_unread(comm):
    data = LazyDataset(12)
    assert not is_in_memory(data)
    shard = scatter_dataset(data, comm)
    assert_all_ranks(comm, shard._base.n_made == 0)
    assert_all_ranks(comm, [shard[0]] == [shard.indices[0] ** 2])
    shard = scatter_dataset(LazyDataset(12), comm, in_memory=True)
    if comm.size > 1:
        assert isinstance(shard._base, list)
        assert len(shard._base) == len(shard)
    assert list(shard) == [i * i for i in shard.indices]
    shard = scatter_dataset([1, 2, 3, 4], comm, in_memory=False)
    assert len(shard._base) == 4


@pytest.mark.parallel(2)
def test_a_large_object_sent_whole_is_warned_of(comm, monkeypatch):
    monkeypatch.setattr("chainermn_ng.datasets.scatter_plan._LARGE_BYTES", 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scatter_dataset(LazyDataset(3), comm)
        scatter_dataset(LazyDataset(3), comm, in_memory=False)
    texts = [str(w.message) for w in caught]
    ok = len(texts) == (comm.rank == 0) and all("in_memory=True" in t for t in texts)
    assert_all_ranks(comm, ok, f"{texts}")


@pytest.mark.parallel([2, 3])
def test_small_messages(comm):
    data = np.arange(100.0)
    shard = scatter_dataset(data, comm, max_buf_len=64)
    assert_all_ranks(comm, list(shard) == data[shard.indices].tolist())


@pytest.mark.reports(
    "chainer/chainermn#88", "chainer/chainermn#129", "chainer/chainercv#622"
)
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("root", [0, 1])
def test_a_data_set_that_cannot_be_pickled_is_an_error_on_all(comm, root):
    def scatter(data):
        return lambda: scatter_dataset(data, comm, root=root)

    unpicklable = datasets.TransformDataset(list(range(9)), lambda sample: sample)
    assert_all_raise(
        comm, scatter(unpicklable), TypeError, "_transform", "scatter_index"
    )
    # The first shard can be sent, the last cannot.
    mixed = [1] * (3 * comm.size - 1) + [lambda: 1]
    if root == comm.size - 1:
        mixed.reverse()
    assert_all_raise(comm, scatter(mixed), TypeError, "scatter_index")
    lazy = LazyDataset(4)
    lazy.handle = lambda: 1
    assert_all_raise(comm, scatter(lazy), TypeError, "handle", "scatter_index")
    assert len(scatter(list(range(6)))()) == 6 // comm.size


class Unloadable:
    def __setstate__(self, state):
        raise OSError("no such file here")

    def __getstate__(self):
        return {"path": "data"}


@pytest.mark.parallel([2, 3])
def test_a_shard_that_cannot_be_loaded_is_an_error_on_all(comm):
    data = [Unloadable() for _ in range(6)]
    assert_all_raise(
        comm, lambda: scatter_dataset(data, comm), TypeError, "no such file", "rank 1"
    )


@pytest.mark.parallel([2, 3])
def test_bad_arguments_are_errors_on_all(comm):
    data = list(range(6))
    for kwargs, error, text in (
        ({"root": comm.size}, ValueError, "root"),
        ({"root": -1}, ValueError, "root"),
        ({"root": int(comm.rank == 1)}, MismatchError, "root=1"),
        ({"max_buf_len": 0}, ValueError, "max_buf_len"),
        ({"shuffle": True, "seed": -5}, ValueError, "eed"),
        ({"force_equal_length": comm.rank == 0}, MismatchError, "force_equal_length"),
    ):
        assert_all_raise(
            comm, lambda k=kwargs: scatter_dataset(data, comm, **k), error, text
        )
    for nothing in (None, 5):
        assert_all_raise(
            comm, lambda n=nothing: scatter_dataset(n, comm), TypeError, "length"
        )


@pytest.mark.reports("chainer/chainermn#274")
@pytest.mark.parallel([1, 2, 3])
def test_other_kinds_of_communicators(comm):
    for given in (comm.engine, MPI.COMM_WORLD):
        shard = scatter_dataset(list(range(6)), given)
        assert len(shard) == 6 // comm.size
        assert scatter_index(6, given)[0] == 6 // comm.size * comm.rank


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("n_samples", [0, 1, 5, 8])
def test_scatter_index(comm, n_samples):
    n_given = n_samples if comm.rank == 0 else -1
    begin, end = scatter_index(n_given, comm, force_equal_length=False)
    parts = comm.allgather_obj(list(range(begin, end)))
    joined = [i for p in parts for i in p]
    assert_all_ranks(comm, joined == list(range(n_samples)), f"{parts}")
    begin, end = scatter_index(n_samples, comm)
    parts = comm.allgather_obj(list(range(begin, end)))
    ok = {i for p in parts for i in p} == set(range(n_samples))
    assert_all_ranks(comm, ok and len({len(p) for p in parts}) == 1, f"{parts}")
    assert_all_raise(comm, lambda: scatter_index(-2, comm), DataSizeError, "-2")
    assert_all_raise(comm, lambda: scatter_index("x", comm), TypeError)
    assert_all_raise(comm, lambda: scatter_index(2, comm, root=9), ValueError, "9")


@pytest.mark.parallel([1, 2])
def test_deprecated_counting_of_iterations(comm):
    data = [0] * (5 + comm.rank)
    with pytest.warns(DeprecationWarning, match="epoch"):
        assert get_n_iterations_for_one_epoch(data, 2, comm) == 3
    with pytest.warns(DeprecationWarning, match="epoch"):
        assert get_epoch_trigger(4, data, 2, comm) == (12, "iteration")
    assert create_empty_dataset(data) == [()] * len(data)


class Padded(list):
    n_padding = 2


def test_padding_is_found_below_chainers_data_sets():
    base = Padded([0, 1, 2, 3])
    assert padding_mask([1, 2]) is None
    tail = [False, False, True, True]
    transformed = datasets.TransformDataset(base, first_of)
    for data, expected in (
        (base, tail),
        (transformed, tail),
        (datasets.TransformDataset(transformed, first_of), tail),
        (datasets.TupleDataset(base, [1] * 4), tail),
        (datasets.DictDataset(a=[1] * 4, b=base), tail),
        (datasets.SubDataset(base, 1, 3), [False, True]),
        (datasets.SubDataset(base, 0, 2, [3, 0, 1, 2]), [True, False]),
        (datasets.ConcatenatedDataset(base, [1]), [*tail, False]),
    ):
        assert padding_mask(data).tolist() == expected, type(data)
    assert padding_mask(datasets.SubDataset(base, 0, 2)) is None
    assert padding_mask(datasets.TupleDataset([1], [2])) is None


def test_cutting_repeats_and_reorders():
    x = np.arange(4)
    assert cut(x, [3, 0, 0]).tolist() == [3, 0, 0]
    assert cut(datasets.TupleDataset(x, [5, 6, 7, 8]), [2, 1])[:] == [(2, 7), (1, 6)]

    class Renumbered(list):
        def __getitem__(self, index):
            return -index

    assert not is_in_memory(Renumbered([1, 2]))
    assert cut(Renumbered([1, 2]), [1]) == [-1]


@pytest.mark.reports("chainer/chainer#5622")
@pytest.mark.parallel([2, 3])
def test_a_batch_larger_than_the_shard_is_warned_of_once(comm):
    from chainermn_ng.optimizers import create_multi_node_optimizer

    shard = scatter_dataset(np.ones((3 * comm.size, 2), "f"), comm)
    model = chainer.links.Linear(2, 2)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(shard, 8),
        optimizer,
        loss_func=lambda x: chainer.functions.mean(model(x)),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            updater.update()
    texts = [str(w.message) for w in caught if "shard" in str(w.message)]
    ok = len(texts) == (comm.rank == 0)
    ok = ok and all("8 samples" in t and "only 3" in t for t in texts)
    assert_all_ranks(comm, ok, f"{texts}")


@pytest.mark.parallel([2, 3])
def test_training_on_equally_long_shards_ends_together(comm):
    from chainermn_ng.optimizers import create_multi_node_optimizer

    data = np.ones((4 * comm.size + 1, 2), "f")
    shard = scatter_dataset(data, comm)
    model = chainer.links.Linear(2, 2)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(shard, 2),
        optimizer,
        loss_func=lambda x: chainer.functions.mean(model(x)),
    )
    while updater.epoch < 2:
        updater.update()
    ends = comm.allgather_obj((updater.iteration, updater.epoch, optimizer.epoch))
    assert_all_ranks(comm, len(set(ends)) == 1 and ends[0][0] == 5, f"{ends}")
