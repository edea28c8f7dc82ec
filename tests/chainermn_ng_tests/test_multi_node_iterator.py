import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import datasets, iterators
from chainer.training import extensions
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks, same_everywhere
from mpi4py import MPI

from chainermn_ng.datasets import scatter_dataset
from chainermn_ng.extensions import create_multi_node_evaluator
from chainermn_ng.iterators import create_multi_node_iterator
from communicators import MismatchError, RankFailedError

ATTRIBUTES = (
    "epoch",
    "epoch_detail",
    "previous_epoch_detail",
    "is_new_epoch",
    "current_position",
    "batch_size",
    "repeat",
    "dataset_size",
)


def shared(comm, data, batch_size, master=0, **kwargs):
    """Only the master has the data."""
    actual = None
    if comm.rank == master:
        actual = iterators.SerialIterator(data, batch_size, **kwargs)
    return create_multi_node_iterator(actual, comm, master)


def dtypes_of(obj):
    if isinstance(obj, dict):
        return {key: dtypes_of(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [dtypes_of(value) for value in obj]
    if isinstance(obj, np.ndarray):
        return obj.dtype.str, obj.shape, obj.flags.f_contiguous, obj.tobytes()
    if isinstance(obj, chainer.Variable):
        return "variable", dtypes_of(obj.array)
    return type(obj).__name__, repr(obj)


def some_data(kind):
    random = np.random.RandomState(3)
    x = random.normal(size=(7, 2, 3))
    return {
        "float16": list(x.astype("e")),
        "big integers": [np.array([2**53 + i, -i]) for i in range(7)],
        "pairs": [(x[i].astype("f"), np.int32(i)) for i in range(7)],
        "array and Python int": [(x[i], 2**60 + i) for i in range(7)],
        "triples": [(x[i], i, f"word {i}") for i in range(7)],
        "dictionaries": [{"x": x[i], "boxes": x[: i + 1, 0]} for i in range(7)],
        "integers": list(range(7)),
        "texts": list("abcdefg"),
        "lists of any length": [x[:i].tolist() for i in range(7)],
        "transposed": [x[i].T for i in range(7)],
        "views with gaps": [x[i][:, ::2] for i in range(7)],
        "no elements": [np.empty((0, i), "d") for i in range(7)],
        "scalars": [np.array(i, "e") for i in range(7)],
        "structures": [np.zeros(2, [("a", "f4"), ("b", "i1")]) for _ in range(7)],
        "variables": [chainer.Variable(x[i].astype("f")) for i in range(7)],
        "objects": [np.array([None, i], object) for i in range(7)],
    }[kind]


KINDS = [
    "float16",
    "big integers",
    "pairs",
    "array and Python int",
    "triples",
    "dictionaries",
    "integers",
    "texts",
    "lists of any length",
    "transposed",
    "views with gaps",
    "no elements",
    "scalars",
    "structures",
    "variables",
    "objects",
]


@pytest.mark.reports("chainer/chainermn#252")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_kind_arrive_as_they_are(comm, kind):
    data = some_data(kind)
    it = shared(comm, data, 3, master=comm.size - 1, repeat=False, shuffle=False)
    batches = list(it)
    expected = [data[:3], data[3:6], data[6:]]
    ok = dtypes_of(batches) == dtypes_of(expected)
    assert_all_ranks(comm, ok, f"{batches} {expected}")


@pytest.mark.parallel(2)
def test_arrays_are_not_pickled_and_can_be_written_to(comm):
    data = [np.zeros(25_000, "f") for _ in range(10)]
    it = shared(comm, data, 10, shuffle=False)
    before = comm.sent_bytes["messages"]
    batch = next(it)
    sent = comm.sent_bytes["messages"] - before
    assert_all_ranks(comm, sent < 1_010_000, f"{sent} bytes")
    batch[3] += 1
    assert_all_ranks(comm, batch[2].sum() == 0 and batch[3].sum() == 25_000)


@pytest.mark.reports("chainer/chainermn#259", "chainer/chainermn#219")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", ["serial", "threads"])
def test_every_rank_shows_the_state_of_the_master(comm, kind):
    data = list(range(5))
    cls = (
        iterators.SerialIterator if kind == "serial" else iterators.MultithreadIterator
    )
    actual = cls(data, 2) if comm.rank == 0 else None
    reference = cls(data, 2, shuffle=False)
    with create_multi_node_iterator(actual, comm) as it:
        ok = len(it.dataset) == 5 and iter(it) is it
        for _ in range(6):
            shown = [getattr(it, name) for name in ATTRIBUTES[:-1]]
            ok &= shown == [getattr(reference, name) for name in ATTRIBUTES[:-1]]
            ok &= it.dataset_size == 5
            assert_all_ranks(comm, ok and same_everywhere(comm, it.next()), f"{shown}")
            next(reference)
        it.reset()
        assert_all_ranks(
            comm, it.epoch_detail == 0 and it.previous_epoch_detail is None
        )
        batches = [next(it) for _ in range(4)]
        ok = it.epoch_detail == 1.6 and same_everywhere(comm, batches)
        assert_all_ranks(comm, ok, f"{batches}")
        it.batch_size = 3
        next(it)  # this one may have been loaded before
        ok = len(next(it)) == it.batch_size == 3
        assert_all_ranks(comm, ok)
    reference.finalize()


class Mean(chainer.Chain):
    def forward(self, x):
        chainer.report({"mean": x.mean()}, self)


@pytest.mark.reports("chainer/chainermn#259", "chainer/chainermn#219")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("multi_node", [False, True])
def test_in_an_evaluator_twice(comm, multi_node):
    data = np.arange(6, dtype="f")
    it = shared(comm, data, 2, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(it, Mean())
    if multi_node:
        evaluator = create_multi_node_evaluator(evaluator, comm)
    for _ in range(2):
        result = evaluator()
        assert_all_ranks(comm, np.isclose(result["main/mean"], 2.5), f"{result}")


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_padding_of_the_masters_shard_is_left_out_of_evaluations(comm, shuffle):
    shard = scatter_dataset(np.arange(comm.size + 1, dtype="f"), comm)
    master = comm.size - 1
    it = shared(comm, shard, 2, master, repeat=False, shuffle=shuffle)
    expected = comm.bcast_obj(shard[0], root=master)
    evaluator = create_multi_node_evaluator(extensions.Evaluator(it, Mean()), comm)
    for _ in range(2):
        result = evaluator()
        assert_all_ranks(comm, result["main/mean"] == expected, f"{result}")


@pytest.mark.parallel([1, 2, 3])
def test_no_samples_and_the_end_come_to_all_ranks_together(comm):
    it = shared(comm, [], 2, repeat=False, shuffle=False)
    assert_all_ranks(comm, list(it) == [] and it.epoch_detail == it.epoch)
    it = shared(comm, [1, 2, 3], 2, repeat=False, shuffle=False)
    for _ in range(2):
        assert_all_ranks(comm, list(it) == [[1, 2], [3]])
        assert_all_ranks(comm, list(it) == [])
        it.reset()


class Broken(chainer.dataset.DatasetMixin):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    def get_example(self, i):
        if i == 2:
            raise self.error
        return i


class Unloadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parallel([2, 3])
def test_errors_of_the_master_are_raised_on_all(comm):
    it = shared(comm, Broken(ValueError("bad picture")), 2, shuffle=False)
    assert_all_ranks(comm, next(it) == [0, 1])
    assert_all_raise(comm, it.next, ValueError, "bad picture")
    it = shared(comm, Broken(KeyError("label")), 4, shuffle=False)
    mine = KeyError if comm.rank == 0 else RankFailedError
    assert_all_raise(comm, it.next, mine, "label")
    it = shared(comm, [(1, lambda: 1)], 1)
    assert_all_raise(comm, it.next, TypeError, "pickle", "lambda")
    it = shared(comm, [Unloadable()], 1)
    assert_all_raise(comm, it.next, TypeError, "cannot unpickle the batch")


@pytest.mark.parallel([2, 3])
def test_mistakes_of_callers_are_errors_on_all(comm):
    def create(iterator, master=0):
        return lambda: create_multi_node_iterator(iterator, comm, master)

    assert_all_raise(comm, create([1, 2]), TypeError, "list", "expected an iterator")
    assert_all_raise(comm, create(None, comm.size), ValueError, "root")
    serial = iterators.SerialIterator([1], 1)
    both = create(serial, comm.rank % 2)
    assert_all_raise(comm, both, MismatchError, "rank_master=1")
    first, second = (shared(comm, [1], 1) for _ in range(2))
    other = first if comm.rank == 0 else second
    assert_all_raise(comm, other.next, MismatchError, "multi-node iterator")
    assert_all_ranks(comm, next(first) == [1])
    with pytest.raises(TypeError, match="create_communicator"):
        create_multi_node_iterator(None, MPI.COMM_WORLD)
    away = first.dataset
    if comm.rank != 0:
        with pytest.raises(TypeError, match="on rank 0"):
            away[0]
        with pytest.raises(AttributeError, match="n_prefetch"):
            _ = first.n_prefetch


@pytest.mark.parallel([1, 2, 3])
def test_an_engine_communicator_will_do(comm):
    it = create_multi_node_iterator(
        iterators.SerialIterator([1, 2], 1, shuffle=False), comm.engine
    )
    assert_all_ranks(comm, [next(it), next(it)] == [[1], [2]])


@pytest.mark.reports("chainer/chainer#3754")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", ["serial", "threads"])
@pytest.mark.parametrize("from_master", [False, True])
def test_resume_goes_on_as_the_unbroken_run_would(comm, tmp_path, kind, from_master):
    cls = (
        iterators.SerialIterator if kind == "serial" else iterators.MultithreadIterator
    )

    def create(seed):
        sampler = iterators.ShuffleOrderSampler(np.random.RandomState(seed))
        actual = cls(list(range(5)), 2, order_sampler=sampler)
        return create_multi_node_iterator(actual if comm.rank == 0 else None, comm)

    it = create(1)
    for _ in range(4):
        next(it)
    target = {}
    it.serialize(chainer.serializers.DictionarySerializer(target))
    shown = [getattr(it, name) for name in ATTRIBUTES]
    expected = [next(it) for _ in range(9)]
    if from_master:
        target = comm.bcast_obj(target)
    again = create(2)
    next(again)
    again.serialize(chainer.serializers.NpzDeserializer(target))
    resumed = [getattr(again, name) for name in ATTRIBUTES]
    assert_all_ranks(comm, resumed == shown, f"{resumed} {shown}")
    got = [next(again) for _ in range(9)]
    assert_all_ranks(comm, got == expected and again.epoch == it.epoch, f"{got}")
    it.finalize()
    again.finalize()


@pytest.mark.parallel(2)
def test_training_of_both_ranks_on_the_masters_batches(comm):
    from chainermn_ng.optimizers import create_multi_node_optimizer

    x = np.random.RandomState(0).normal(size=(6, 2)).astype("f")
    data = datasets.TupleDataset(x, np.zeros(6, "i"))
    model = L.Classifier(L.Linear(2, 2))
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    it = shared(comm, data, 4)
    updater = chainer.training.StandardUpdater(it, optimizer)
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out="unused")
    calls = []
    trainer.extend(lambda t: calls.append(t.updater.iteration), trigger=(1, "epoch"))
    trainer.run()
    assert_all_ranks(comm, calls == [2, 3] and updater.iteration == 3, f"{calls}")
