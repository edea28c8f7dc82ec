import warnings

import chainer
import numpy as np
import pytest
from chainer import datasets
from chainer.dataset import concat_examples
from chainer.training import extensions
from helpers.chainer_models import MLP, are_close, batches, same_on_all_ranks, weights
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.datasets import scatter_dataset
from chainermn_ng.extensions import create_multi_node_evaluator
from chainermn_ng.extensions.aggregate_observations import samples_of_last_batch
from chainermn_ng.iterators import ShardIterator
from chainermn_ng.links import MultiNodeBatchNormalization
from chainermn_ng.optimizers import create_multi_node_optimizer
from communicators import MismatchError


def iterator_over(comm, n_samples, batch_size, equal=False, **kwargs):
    data = list(range(10, 10 + n_samples)) if comm.rank == 0 else None
    shard = scatter_dataset(data, comm, force_equal_length=equal, shuffle=True, seed=1)
    return ShardIterator(shard, batch_size, comm, **kwargs)


def epoch_of(it):
    """Return an epoch's batches, without the samples that do not count."""
    found = []
    while not (found and it.is_new_epoch):
        batch = next(it)
        ok = it.count_samples() == (0 if it.batch_padding is not None else len(batch))
        assert ok
        assert it.batch_padding is None or it.batch_padding.all()
        found.append(batch if it.batch_padding is None else [])
    return found


@pytest.mark.reports("horovod/horovod#832", "horovod/horovod#2083")
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("n_samples", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("equal", [False, True])
def test_every_sample_once_an_epoch_in_equally_many_steps(
    comm, n_samples, batch_size, equal
):
    it = iterator_over(comm, n_samples, batch_size, equal)
    longest = -(-n_samples // comm.size)
    for epoch in (1, 2):
        found = epoch_of(it)
        ok = len(found) == it.n_iterations == -(-longest // batch_size)
        ok &= all(len(batch) <= batch_size for batch in found)
        # A shorter shard is spread over all of the batches.
        lengths = [len(batch) for batch in found]
        ok &= max(lengths) - min(lengths) <= 1
        ok &= it.epoch == it.epoch_detail == epoch and it.current_position == 0
        assert_all_ranks(comm, ok, f"{found} {it.epoch_detail}")
        joined = sorted(
            x for part in comm.allgather_obj(found) for b in part for x in b
        )
        expected = list(range(10, 10 + n_samples))
        assert_all_ranks(comm, joined == expected, f"{joined}")


@pytest.mark.parallel([1, 2, 3])
def test_the_interface_of_an_iterator(comm):
    it = iterator_over(comm, 2 * comm.size + 1, 1, repeat=False)
    assert (it.n_iterations, it.batch_size, it.repeat) == (3, 1, False)
    for _ in range(2):
        details = [(it.previous_epoch_detail, it.epoch_detail, it.is_new_epoch)]
        for _ in it:
            details.append((it.previous_epoch_detail, it.epoch_detail, it.is_new_epoch))
        thirds = [k / 3 for k in range(4)]
        expected = [(None, 0.0, False)]
        expected += [(thirds[k], thirds[k + 1], k == 2) for k in range(3)]
        assert_all_ranks(comm, details == expected, f"{details}")
        with pytest.raises(StopIteration):
            it.next()
        it.reset()
    it.finalize()


@pytest.mark.parallel([1, 2, 3])
def test_orders_are_those_of_the_seed(comm):
    def orders(seed, **kwargs):
        it = iterator_over(comm, 8 * comm.size, 8, seed=seed, **kwargs)
        return [next(it) for _ in range(3)]

    np.random.seed(comm.rank)
    state = repr(np.random.get_state())
    by_default = orders(None)
    unchanged = repr(np.random.get_state()) == state
    assert_all_ranks(comm, unchanged and orders(None) != by_default)
    first, *_ = again = orders(3)
    ok = again == orders(3) != orders(4) and len(set(map(tuple, again))) == 3
    assert_all_ranks(comm, ok and sorted(first) == sorted(again[1]), f"{again}")
    plain = orders(3, shuffle=False)
    assert_all_ranks(comm, plain[0] == plain[1] and sorted(first) == sorted(plain[0]))


def trained(comm, n_samples, batch_size, n_epochs, equal=False, double=False):
    data = datasets.TupleDataset(*batches(1, n_samples)[0])
    shard = scatter_dataset(data, comm, force_equal_length=equal)
    it = ShardIterator(shard, batch_size, comm, shuffle=False)
    model = MLP()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.3),
        comm,
        double_buffering=double,
        count_samples=it.count_samples,
    ).setup(model)
    updater = chainer.training.StandardUpdater(it, optimizer)
    trainer = chainer.training.Trainer(updater, (n_epochs, "epoch"), out="unused")
    fired = []
    trainer.extend(lambda t: fired.append(t.updater.iteration), trigger=(1, "epoch"))
    trainer.run()
    optimizer.flush()
    return model, it, fired


def trained_alone(comm, it, n_samples, n_epochs):
    """Train one process on the joined batches of all ranks."""
    x, t = batches(1, n_samples)[0]
    model = MLP()
    optimizer = chainer.optimizers.MomentumSGD(0.3).setup(model)
    begins = np.cumsum([0, *it._lengths[:-1]])
    for _ in range(n_epochs):
        for k in range(it.n_iterations):
            chosen = [
                begin
                + np.arange(n * k // it.n_iterations, n * (k + 1) // it.n_iterations)
                for begin, n in zip(begins, it._lengths, strict=True)
            ]
            chosen = np.concatenate(chosen)
            optimizer.update(model, x[chosen], t[chosen])
    return model


@pytest.mark.reports(
    "horovod/horovod#832", "horovod/horovod#2083", "horovod/horovod#3980"
)
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(("n_samples", "batch_size"), [(9, 2), (2, 1), (1, 2), (11, 4)])
@pytest.mark.parametrize("equal", [False, True])
def test_training_equals_one_process_and_ends_together(
    comm, n_samples, batch_size, equal
):
    model, it, fired = trained(comm, n_samples, batch_size, 3, equal)
    alone = trained_alone(comm, it, n_samples, 3)
    ok = are_close(weights(model), weights(alone))
    ok &= fired == [it.n_iterations * k for k in (1, 2, 3)]
    assert_all_ranks(comm, ok, f"{fired}")
    assert_all_ranks(comm, same_on_all_ranks(comm, model))


class Normalized(chainer.Chain):
    """Two normalizations; gradients travel through the later into the earlier."""

    def __init__(self, normalization):
        super().__init__()
        with self.init_scope():
            self.first = normalization(5)
            self.last = normalization(7)
            self.mlp = MLP()

    def forward(self, x, t):
        h = self.last(self.mlp.l1(self.first(x)))
        return chainer.functions.softmax_cross_entropy(self.mlp.l2(h), t)


@pytest.mark.parallel([2, 3])
def test_a_sample_that_does_not_count_is_not_in_joint_statistics(comm):
    """Rank 0 has one sample for all of the iterations, or none; the others two each."""
    for n_own in (1, 0):
        n_samples = n_own if comm.rank == 0 else 8
        x, t = batches(1, n_samples, seed=comm.rank)[0]
        x = x * (100 if comm.rank == 0 else 1)
        it = ShardIterator(datasets.TupleDataset(x, t), 2, comm, shuffle=False)
        model = Normalized(lambda size: MultiNodeBatchNormalization(size, comm))
        alone = Normalized(chainer.links.BatchNormalization)
        optimizer = create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(0.3), comm, count_samples=it.count_samples
        ).setup(model)
        optimizer_alone = chainer.optimizers.MomentumSGD(0.3).setup(alone)
        for _ in range(it.n_iterations):
            batch = concat_examples(next(it))
            optimizer.update(model, *batch)
            counted = batch if it.batch_padding is None else [a[:0] for a in batch]
            parts = zip(*comm.allgather_obj(counted), strict=True)
            optimizer_alone.update(alone, *map(np.concatenate, parts))
        assert_all_ranks(comm, are_close(weights(model), weights(alone)))
        for name in ("first", "last"):
            for attribute in ("avg_mean", "avg_var"):
                found, expected = (
                    getattr(getattr(m, name), attribute) for m in (model, alone)
                )
                ok = np.allclose(found, expected, 1e-4, 1e-5)
                assert_all_ranks(comm, ok, f"{name} {attribute}: {found} {expected}")


@pytest.mark.parallel([1, 2])
def test_reports_weigh_the_samples_that_count(comm):
    shard = list(range(3 if comm.rank else 5))
    it = ShardIterator(shard, 1 if comm.rank == 0 else 3, comm)
    updater = chainer.training.StandardUpdater(
        it, chainer.optimizers.SGD().setup(MLP())
    )
    trainer = chainer.training.Trainer(updater)
    found = []
    it.count_samples()  # as the optimizer does, else there is a warning
    for _ in range(it.n_iterations):
        next(it)
        found.append(samples_of_last_batch(trainer))
    expected = [0, 1, 0, 1, 1] if comm.rank else [1] * 5
    assert_all_ranks(comm, found == expected, f"{found}")


@pytest.mark.parallel(2)
def test_training_with_double_buffering_ends_together(comm):
    model, _, fired = trained(comm, 5, 2, 2, double=True)
    assert_all_ranks(comm, fired == [2, 4] and same_on_all_ranks(comm, model))


@pytest.mark.parallel([2, 3])
def test_an_optimizer_that_does_not_count_is_warned_of_once(comm):
    def texts_of(n_samples, asks):
        it = iterator_over(comm, n_samples, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                next(it)
                if asks:
                    it.count_samples()
        return [str(w.message) for w in caught]

    uneven = 4 * comm.size + 1
    found = texts_of(uneven, False)
    ok = len(found) == (comm.rank == 0) and all("count_samples" in t for t in found)
    assert_all_ranks(comm, ok, f"{found}")
    assert_all_ranks(comm, texts_of(uneven, True) == texts_of(4 * comm.size, False))


class Mean(chainer.Chain):
    def forward(self, x):
        chainer.report({"mean": x.mean()}, self)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("n_samples", [0, 1, 5])
def test_in_an_evaluator(comm, n_samples):
    data = np.arange(n_samples, dtype="f")
    shard = scatter_dataset(data, comm, force_equal_length=False)
    it = ShardIterator(shard, 1, comm, repeat=False)
    evaluator = create_multi_node_evaluator(extensions.Evaluator(it, Mean()), comm)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the evaluation has no result")
            result = evaluator()
        expected = {"main/mean": data.mean()} if n_samples else {}
        assert_all_ranks(comm, result == expected, f"{result}")


@pytest.mark.reports("chainer/chainer#3754")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("n_before", [0, 1, 4])
def test_resume_goes_on_as_the_unbroken_run_would(comm, n_before):
    def draw(it, n):
        return [(next(it), it.count_samples()) for _ in range(n)]

    it = iterator_over(comm, 5 * comm.size - 1, 2)
    draw(it, n_before)
    target = {}
    it.serialize(chainer.serializers.DictionarySerializer(target))
    expected = draw(it, 8)
    again = iterator_over(comm, 5 * comm.size - 1, 2)
    draw(again, 2)
    again.serialize(chainer.serializers.NpzDeserializer(target))
    shown = again.epoch, again.previous_epoch_detail, again.is_new_epoch
    got = draw(again, 8)
    assert_all_ranks(comm, got == expected and again.epoch == it.epoch, f"{got}")
    n = it.n_iterations
    before = None if n_before == 0 else (n_before - 1) // n + (n_before - 1) % n / n
    expected = n_before // n, before, n_before > 0 and n_before % n == 0
    assert_all_ranks(comm, shown == expected, f"{shown}")


@pytest.mark.parallel([1, 2])
def test_a_snapshot_of_other_shards_begins_its_epoch_anew(comm):
    it = iterator_over(comm, 6 * comm.size, 2)
    for _ in range(5):
        next(it)
    target = {}
    it.serialize(chainer.serializers.DictionarySerializer(target))
    again = iterator_over(comm, 6 * comm.size - 1, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.serialize(chainer.serializers.NpzDeserializer(target))
    texts = [str(w.message) for w in caught]
    ok = len(texts) == (comm.rank == 0) and all(
        "epoch 1 begins anew" in t for t in texts
    )
    assert_all_ranks(comm, ok and again.epoch_detail == 1, f"{texts}")
    assert_all_ranks(comm, len(epoch_of(again)) == again.n_iterations)


class Unreadable(list):
    def __getitem__(self, index):
        raise OSError("disk")


@pytest.mark.parallel([1, 2, 3])
def test_mistakes_are_errors_on_all(comm):
    last = comm.rank == comm.size - 1

    def create(data, batch_size=2, **kwargs):
        return lambda: ShardIterator(data, batch_size, comm, **kwargs)

    assert_all_raise(comm, create([]), ValueError, "no rank has a sample")
    assert_all_raise(comm, create([1], 2 - 2 * last), ValueError, "batch_size 0")
    assert_all_raise(comm, create([1], seed=-last), ValueError, "seed -1")
    assert_all_raise(comm, create(3 if last else [1]), TypeError, "len()")
    assert list(create([], repeat=False)()) == []
    if comm.size > 1:
        differs = create([1], repeat=last)
        assert_all_raise(comm, differs, MismatchError, "repeat=True")
        data = Unreadable([1]) if last else []
        assert_all_raise(comm, create(data), OSError, "disk")


@pytest.mark.parallel([1, 2])
def test_other_kinds_of_communicators(comm):
    for given in (comm.engine, MPI.COMM_WORLD):
        it = ShardIterator(list(range(3 + comm.rank)), 2, given)
        assert_all_ranks(comm, it.n_iterations == 2)


@pytest.mark.reports("horovod/horovod#832", "horovod/horovod#2083")
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("kind", ["uneven", "equal", "shard iterator"])
def test_training_on_uneven_shards_is_warned_of_up_front(comm, kind):
    shard = scatter_dataset(
        np.ones((2 * comm.size + 1, 2), "f"), comm, force_equal_length=kind == "equal"
    )
    count = None
    if kind == "shard iterator":
        count = ShardIterator(shard, 2, comm).count_samples
    model = chainer.links.Linear(2, 2)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, count_samples=count and len
    ).setup(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x = np.ones((2, 2), "f")
            optimizer.update(lambda x: chainer.functions.mean(model(x)), x)
    texts = [str(w.message) for w in caught]
    expected = int(kind == "uneven" and comm.rank == 0)
    ok = len(texts) == expected and all("shards of 2 to 3" in text for text in texts)
    assert_all_ranks(comm, ok, f"{texts}")
