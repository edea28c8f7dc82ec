import copy
import warnings

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import datasets, iterators
from chainer.training import extensions
from helpers.chainer_models import MLP, batches
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.datasets import scatter_dataset
from chainermn_ng.extensions import create_multi_node_evaluator
from communicators import MismatchError, RankFailedError


class Mean(chainer.Chain):
    """Reports the mean of its input, and other keys for some inputs."""

    def __init__(self, report_more=None):
        super().__init__()
        self.seen = []
        self.report_more = report_more

    def forward(self, x):
        self.seen += x.tolist()
        chainer.report({"mean": chainer.Variable(np.asarray(x.mean()))}, self)
        if self.report_more is not None:
            chainer.report(self.report_more(x), self)


def evaluator_of(comm, shard, batch_size, model=None, cls=extensions.Evaluator, **kw):
    iterator = iterators.SerialIterator(shard, batch_size, repeat=False, shuffle=False)
    return create_multi_node_evaluator(cls(iterator, model or Mean()), comm, **kw)


@pytest.mark.reports(
    "chainer/chainer#7305",
    "RUCAIBox/RecBole#1872",
    "chainer/chainer#8546",
    "awslabs/graphstorm#959",
    "chainer/chainermn#274",
)
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("n_samples", [1, 2, 5, 11])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("equal", [False, True])
def test_the_result_is_that_of_one_process(comm, n_samples, batch_size, equal):
    data = np.arange(n_samples, dtype="f")
    shard = scatter_dataset(data, comm, force_equal_length=equal)
    evaluator = evaluator_of(comm, shard, batch_size)
    for _ in range(2):
        result = evaluator()
        ok = list(result) == ["main/mean"] and np.isclose(
            result["main/mean"], data.mean()
        )
        assert_all_ranks(comm, ok, f"{result}")
    seen = comm.allgather_obj(evaluator.get_target("main").seen)
    assert sorted(x for part in seen for x in part) == sorted([*data, *data])


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(
    "make_iterator",
    [
        lambda shard: iterators.SerialIterator(shard, 2, repeat=False, shuffle=True),
        lambda shard: iterators.MultithreadIterator(shard, 2, repeat=False),
        lambda shard: iterators.MultithreadIterator(
            shard, 2, repeat=False, shuffle=False
        ),
    ],
    ids=["shuffled", "threads, shuffled", "threads"],
)
def test_padding_is_left_out_in_any_order(comm, make_iterator):
    data = np.arange(7, dtype="f")
    shard = datasets.TransformDataset(scatter_dataset(data, comm), np.float32)
    evaluator = extensions.Evaluator(make_iterator(shard), Mean())
    create_multi_node_evaluator(evaluator, comm)
    for _ in range(2):
        assert_all_ranks(comm, np.isclose(evaluator()["main/mean"], 3))
    evaluator.finalize()


@pytest.mark.reports("chainer/chainer#8546", "awslabs/graphstorm#959")
@pytest.mark.parallel([1, 2, 3])
def test_no_samples_anywhere_gives_an_empty_result_and_a_warning(comm):
    evaluator = evaluator_of(comm, scatter_dataset([], comm), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = evaluator()
    texts = [str(w.message) for w in caught if "no result" in str(w.message)]
    assert_all_ranks(comm, result == {} and len(texts) == (comm.rank == 0), f"{texts}")


@pytest.mark.parallel([2, 3])
def test_keys_of_some_ranks_and_weights_of_their_own(comm):
    def more(x):
        found = {"weighted": (x.sum(), len(x) * 10.0), "words": "no number"}
        if comm.rank == 1:
            found["rare"] = 7.0
        return found

    data = np.arange(5, dtype="f")
    shard = scatter_dataset(data, comm, force_equal_length=False)
    result = evaluator_of(comm, shard, 2, Mean(more))()
    parts = [data[shard.indices][i : i + 2] for i in (0, 2)]
    pairs = [(p.sum(), len(p) * 10.0) for p in parts if len(p)]
    pairs = [pair for part in comm.allgather_obj(pairs) for pair in part]
    weighted = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    ok = set(result) == {"main/mean", "main/weighted", "main/rare"}
    ok = (
        ok
        and result["main/rare"] == 7
        and np.isclose(result["main/weighted"], weighted)
    )
    assert_all_ranks(comm, bool(ok), f"{result} {weighted}")


class LastBatch(extensions.Evaluator):
    """Overrides the loop: its result is the mean of what it saw."""

    def evaluate(self):
        iterator = self.get_iterator("main")
        if copies:
            iterator = copy.copy(iterator)
        else:
            iterator.reset()
        samples = [x for batch in iterator for x in batch]
        return {"mean": float(np.mean(samples))} if samples else {}


copies = False


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("copies_iterator", [False, True])
def test_overridden_evaluation_is_weighted_by_its_samples(
    comm, monkeypatch, copies_iterator
):
    monkeypatch.setattr(f"{__name__}.copies", copies_iterator)
    data = np.arange(7, dtype="f")
    for equal in (False, True):
        shard = scatter_dataset(data, comm, force_equal_length=equal)
        evaluator = evaluator_of(comm, shard, 2, cls=LastBatch)
        result = evaluator()
        assert_all_ranks(comm, np.isclose(result["mean"], 3), f"{result}")
        kind = type(evaluator.get_iterator("main"))
        assert kind is iterators.SerialIterator


@pytest.mark.parallel([2, 3])
def test_any_object_with_an_evaluation(comm):
    class Evaluation:
        def evaluate(self):
            return {"rank": comm.rank}

    evaluator = create_multi_node_evaluator(Evaluation(), comm)
    result = evaluator.evaluate()
    assert_all_ranks(comm, result == {"rank": (comm.size - 1) / 2}, f"{result}")


@pytest.mark.parallel(2)
def test_average_of_averages_is_chainermns_rule(comm):
    data = np.arange(5, dtype="f")
    for equal, expected in ((False, 2.375), (True, 2.25)):
        shard = scatter_dataset(data, comm, force_equal_length=equal)
        evaluator = evaluator_of(comm, shard, 2, average_of_averages=True)
        result = evaluator()["main/mean"]
        assert_all_ranks(comm, np.isclose(result, expected), f"{result}")
    shard = scatter_dataset(data[:1], comm, force_equal_length=False)
    evaluator = evaluator_of(comm, shard, 2, average_of_averages=True)
    assert_all_ranks(comm, evaluator() == {"main/mean": 0.0})


@pytest.mark.parallel([2, 3])
def test_an_error_on_one_rank_is_raised_on_all(comm):
    def evaluator_that_raises(error):
        def fail(x):
            if comm.rank == 1:
                raise error

        shard = scatter_dataset(np.arange(6, dtype="f"), comm)
        return evaluator_of(comm, shard, 2, fail_model(fail))

    def fail_model(function):
        model = Mean()
        model.forward = function
        return model

    assert_all_raise(comm, evaluator_that_raises(ValueError("bad")), ValueError, "bad")
    mine = KeyError if comm.rank == 1 else RankFailedError
    assert_all_raise(comm, evaluator_that_raises(KeyError("label")), mine, "label")


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", ["engine", "mpi4py"])
def test_other_kinds_of_communicators(comm, kind):
    given = comm.engine if kind == "engine" else MPI.COMM_WORLD
    shard = scatter_dataset(np.arange(5, dtype="f"), comm)
    result = evaluator_of(given, shard, 2)()
    assert_all_ranks(comm, np.isclose(result["main/mean"], 2))


@pytest.mark.parallel([1, 2, 3])
def test_accuracy_of_a_classifier_and_hooks(comm):
    x, t = batches(1, 10)[0]
    model = L.Classifier(L.Linear(5, 3, initialW=MLP().l1.W.array[:3]))
    calls = []
    whole = iterators.SerialIterator(
        datasets.TupleDataset(x, t), 10, repeat=False, shuffle=False
    )
    expected = extensions.Evaluator(whole, model)()
    shard = scatter_dataset(datasets.TupleDataset(x, t), comm)
    iterator = iterators.SerialIterator(shard, 3, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(iterator, model, eval_hook=calls.append)
    result = create_multi_node_evaluator(evaluator, comm)()
    ok = set(result) == set(expected)
    ok = ok and all(np.isclose(result[k], float(expected[k])) for k in expected)
    assert_all_ranks(comm, ok and calls == [evaluator], f"{result} {expected}")
    # Dictionaries are passed by name, and an evaluation function replaces the model.
    shard = scatter_dataset(datasets.DictDataset(x=x, t=t), comm)
    iterator = iterators.SerialIterator(shard, 3, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(
        iterator, model, eval_func=lambda x, t: model(x, t)
    )
    result = create_multi_node_evaluator(evaluator, comm)()
    ok = all(np.isclose(result[k], float(expected[k])) for k in expected)
    assert_all_ranks(comm, ok, f"{result}")


@pytest.mark.parallel([1, 2])
def test_the_progress_bar_is_shown_on_rank_0_only(comm, capsys):
    shard = scatter_dataset(np.arange(6, dtype="f"), comm)
    iterator = iterators.SerialIterator(shard, 1, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(iterator, Mean(), progress_bar=True)
    create_multi_node_evaluator(evaluator, comm)()
    shown = "iters/sec" in capsys.readouterr().out
    assert_all_ranks(comm, shown == (comm.rank == 0))


class OverItsSamples(extensions.Evaluator):
    """Overrides ``evaluate``; divides by its number of samples."""

    def evaluate(self):
        iterator = self.get_iterator("main")
        iterator.reset()
        samples = [x for batch in iterator for x in batch]
        return {"m": sum(samples) / len(samples)}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("equal", [False, True])
def test_a_rank_with_padding_only_has_no_part_in_an_overridden_evaluate(comm, equal):
    shard = scatter_dataset([5.0], comm, force_equal_length=equal)
    result = evaluator_of(comm, shard, 2, cls=OverItsSamples)()
    assert_all_ranks(comm, result == {"m": 5.0}, f"{result}")


@pytest.mark.parallel([2, 3])
def test_evaluators_called_in_another_order_are_not_mixed(comm):
    a, b = (
        evaluator_of(comm, scatter_dataset(np.full(6, x, "f"), comm), 2) for x in (1, 2)
    )
    first, second = (b, a) if comm.rank == 0 else (a, b)
    assert_all_raise(comm, first, MismatchError, "evaluator 1", "evaluator 0")
    assert_all_raise(comm, second, MismatchError, "evaluator 1", "evaluator 0")
    assert_all_ranks(comm, a()["main/mean"] == 1 and b()["main/mean"] == 2)


class Nothing(extensions.Evaluator):
    """Forgets to return its observations."""

    def evaluate(self):
        return None


@pytest.mark.parallel([1, 2])
def test_no_observations_and_no_evaluator_are_clear_errors(comm):
    evaluator = evaluator_of(comm, scatter_dataset([1.0, 2.0], comm), 1, cls=Nothing)
    with pytest.raises(TypeError, match="expected a dict"):
        evaluator()
    with pytest.raises(TypeError, match="expected an evaluator"):
        create_multi_node_evaluator(3, comm)
