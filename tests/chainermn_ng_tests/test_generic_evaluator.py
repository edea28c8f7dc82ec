import chainer
import numpy as np
import pytest
from chainer import datasets, iterators
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.datasets import scatter_dataset
from chainermn_ng.extensions import GenericMultiNodeEvaluator
from communicators import MismatchError, RankFailedError


class Double(chainer.Chain):
    def forward(self, x):
        assert not chainer.config.enable_backprop
        return (2 * x).tolist()


class Joined(GenericMultiNodeEvaluator):
    """Gives all numbers in one list."""

    def aggregate(self, results):
        return [x for result in results for x in result]


def evaluator_of(comm, shard, batch_size, cls=Joined, target=None, **kwargs):
    it = iterators.SerialIterator(shard, batch_size, repeat=False, shuffle=False)
    return cls(comm, it, target or Double(), **kwargs)


def in_rounds(parts, batch_size):
    """Return the doubled samples in the order of batches, then of ranks."""
    most = max(map(len, parts))
    return [
        2 * x
        for at in range(0, most, batch_size)
        for part in parts
        for x in part[at : at + batch_size]
    ]


@pytest.mark.reports("chainer/chainer#8546")
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("n_samples", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("equal", [False, True])
def test_the_root_gets_the_results_of_all_batches_in_order(comm, n_samples, equal):
    root = comm.size - 1
    data = np.arange(n_samples, dtype="f")
    shard = scatter_dataset(data, comm, force_equal_length=equal)
    own = [shard[i] for i in range(len(shard) - shard.n_padding)]
    expected = in_rounds(comm.allgather_obj(own), 2)
    evaluator = evaluator_of(comm, shard, 2, root=root)
    for _ in range(2):
        result = evaluator(None)
        ok = result == (expected if comm.rank == root else None)
        assert_all_ranks(comm, ok, f"{result} {expected}")
    assert sorted(expected) == (2 * data).tolist()


@pytest.mark.parallel([1, 2, 3])
def test_ranks_with_more_batches_than_others(comm):
    data = list(range(comm.rank * 20))
    result = evaluator_of(comm, np.array(data, "f"), 1)()
    expected = in_rounds([list(range(r * 20)) for r in range(comm.size)], 1)
    assert_all_ranks(comm, comm.rank != 0 or result == expected, f"{result}")


class Lengths(GenericMultiNodeEvaluator):
    def calc_local(self, x, t):
        return None if len(x) == 1 else (len(x), int(t[0]), len(self.comm_name))

    comm_name = "abc"


@pytest.mark.parallel([1, 2, 3])
def test_hooks_converters_and_kinds_of_batches(comm):
    shown = []
    n = 3 * comm.size
    whole = datasets.TupleDataset(np.ones(n, "f"), np.arange(n))
    shard = scatter_dataset(whole, comm)
    evaluator = evaluator_of(comm, shard, 2, Lengths, progress_hook=shown.append)
    result = evaluator()
    expected = [(2, 3 * rank, 3) for rank in range(comm.size)]
    ok = result == (expected if comm.rank == 0 else None)
    assert_all_ranks(comm, ok and len(shown) == (2 if comm.rank == 0 else 0))
    # Dictionaries come by name; the converter and the device are the user's.
    shard = scatter_dataset(datasets.DictDataset(x=np.ones(n, "f")), comm)
    evaluator = evaluator_of(comm, shard, 3, GenericMultiNodeEvaluator, device=-1)
    ok = evaluator() == ([[2.0] * 3] * comm.size if comm.rank == 0 else None)
    assert_all_ranks(comm, ok)
    evaluator = evaluator_of(
        comm,
        scatter_dataset(np.ones(n, "f"), comm),
        3,
        GenericMultiNodeEvaluator,
        lambda x: x,
        converter=lambda batch, device: len(batch),
    )
    assert_all_ranks(comm, evaluator() == ([3] * comm.size if comm.rank == 0 else None))


@pytest.mark.parallel([1, 2])
def test_other_kinds_of_communicators_and_none(comm):
    for given in (comm.engine, MPI.COMM_WORLD):
        result = evaluator_of(given, np.ones(1, "f"), 1)()
        assert_all_ranks(comm, comm.rank != 0 or result == [2.0] * comm.size)
    assert evaluator_of(None, np.ones(3, "f"), 2)() == [2.0] * 3


class Fails(Joined):
    where = "calc_local"
    error: Exception = ValueError("bad batch")

    def calc_local(self, x):
        if self.where == "calc_local" and self.comm.rank == 1:
            raise self.error
        return [1]

    def aggregate(self, results):
        if self.where == "aggregate":
            raise self.error
        return results


@pytest.mark.parallel([2, 3])
def test_errors_are_raised_on_all(comm):
    evaluator = evaluator_of(comm, np.ones(30, "f"), 1, Fails)
    assert_all_raise(comm, evaluator, ValueError, "bad batch")
    evaluator.error = KeyError("label")
    mine = KeyError if comm.rank == 1 else RankFailedError
    assert_all_raise(comm, evaluator, mine, "label")
    evaluator.where = "aggregate"
    mine = KeyError if comm.rank == 0 else RankFailedError
    assert_all_raise(comm, evaluator, mine, "label")
    other = evaluator_of(comm, np.ones(2, "f"), 1)
    chosen = evaluator if comm.rank == 0 else other
    assert_all_raise(comm, chosen, MismatchError, "evaluator 0", "evaluator 1")
    with pytest.raises(ValueError, match="root"):
        evaluator_of(comm, [], 1, root=comm.size)
    with pytest.raises(TypeError, match="unexpected"):
        evaluator_of(comm, [], 1, hook=1)


@pytest.mark.parallel([1, 2])
def test_in_a_trainer_it_reports_from_the_root(comm):
    class Reports(Joined):
        def aggregate(self, results):
            chainer.report({"validation/n": len(results)})

    model = chainer.links.Linear(1, 1)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    it = iterators.SerialIterator([np.zeros(1, "f")] * 4, 2)
    updater = chainer.training.StandardUpdater(
        it, optimizer, loss_func=lambda x: chainer.functions.mean(model(x))
    )
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out="unused")
    trainer.extend(evaluator_of(comm, np.ones(4, "f"), 2, Reports))
    seen = []
    trainer.extend(
        lambda t: seen.append(t.observation.get("validation/n")), trigger=(1, "epoch")
    )
    trainer.run()
    expected = [2 * comm.size] * 2 if comm.rank == 0 else [None] * 2
    assert_all_ranks(comm, seen == expected, f"{seen}")
