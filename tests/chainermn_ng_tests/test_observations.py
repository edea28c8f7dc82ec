"""Observations of all ranks in the trainer's log."""

import gc
import json
import pathlib
import weakref

import chainer
import numpy as np
import pytest
from chainer.training import StandardUpdater, Trainer
from chainer.training import extensions as chainer_extensions
from helpers.chainer_models import MLP
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from helpers.snapshots import load, saved

from chainermn_ng.extensions import AggregateObservations, ObservationAggregator
from chainermn_ng.extensions.weighted_sums import WeightedSums
from communicators import MismatchError


class FakeTrainer:
    """What the extensions ask a trainer for, at one iteration after another."""

    def __init__(self):
        self.observation = {}
        self.updater = self
        self.iteration = 0

    def next(self, observation):
        self.iteration += 1
        self.observation = observation
        return self


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.reports("chainer/chainer#6974", "chainer/chainer#7302")
@pytest.mark.parametrize(
    "kind",
    [
        lambda v: chainer.Variable(np.array(v, "f")),
        lambda v: np.array(v, "d"),
        lambda v: np.float16(v),
        lambda v: v,
        lambda v: int(v),
    ],
    ids=["variable", "array", "scalar", "float", "int"],
)
def test_any_number_becomes_a_plain_float(comm, kind):
    aggregate = ObservationAggregator(comm, "loss", "mean loss")
    trainer = FakeTrainer().next({"loss": kind(1.0 + 2 * comm.rank)})
    given = trainer.observation["loss"]
    aggregate(trainer)
    ok = trainer.observation["loss"] is given
    found = trainer.observation["mean loss"]
    ok = ok and type(found) is float and found == comm.size
    assert_all_ranks(comm, ok, f"{trainer.observation}")


@pytest.mark.parallel([1, 2])
def test_numbers_that_no_float_holds(comm):
    """Huge ones are infinite; complex ones and texts are no observations."""
    last = comm.rank == comm.size - 1
    complex_ones = {
        "python": 1 + 2j,
        "numpy": np.complex64(1 + 2j),
        "array": np.array(1 + 2j),
        "variable": chainer.Variable(np.array(1 + 2j)),
        "text": "3",
    }
    given = {"huge": 10**400 if last else 1, "negative": -(10**400), **complex_ones}
    trainer = FakeTrainer().next(dict(given))
    AggregateObservations(comm, weight=lambda t: 1)(trainer)
    found = trainer.observation
    ok = found.pop("huge") == np.inf and found.pop("negative") == -np.inf
    ok = ok and all(found[key] is value for key, value in complex_ones.items())
    assert_all_ranks(comm, ok and found.keys() == complex_ones.keys(), f"{found}")
    sums = WeightedSums()
    sums.add(given, 2)
    means = sums.mean_over_ranks(comm.engine)
    assert_all_ranks(comm, means == {"huge": np.inf, "negative": -np.inf}, f"{means}")
    trainer.next(dict(given))
    for key in ("python", "numpy", "array", "variable", "huge"):
        ObservationAggregator(comm, key)(trainer)
        expected = np.inf if key == "huge" else 1 + 2j
        found = trainer.observation[key]
        assert_all_ranks(comm, bool(found == expected), f"{key}: {found!r}")


@pytest.mark.parallel([1, 2])
@pytest.mark.reports("chainer/chainer#6974", "chainer/chainer#7302")
def test_a_variable_is_untouched_and_its_graph_is_not_kept(comm):
    aggregate = ObservationAggregator(comm, "loss", comm_trigger=(2, "iteration"))
    x = chainer.Variable(np.arange(3, dtype="f"))
    loss = chainer.functions.sum(x**2)
    trainer = FakeTrainer().next({"loss": loss})
    array, device = loss.array, loss.device
    aggregate(trainer)
    assert loss.array is array
    assert loss.device == device
    loss.backward()
    assert (x.grad == [0, 2, 4]).all()
    graph = weakref.ref(loss.creator_node)
    del loss, array
    trainer.next({"loss": 3.0})
    gc.collect()
    assert graph() is None
    aggregate(trainer)
    assert trainer.observation["loss"] == 4.0


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.reports("chainer/chainer#6974", "espnet/espnet#1723")
def test_keys_that_ranks_lack(comm):
    trainer = FakeTrainer()
    for make in (
        ObservationAggregator,
        lambda comm, key: AggregateObservations(comm, [key], weight=lambda t: 2),
    ):
        aggregate = make(comm, "validation/loss")
        aggregate(trainer.next({"other": 1}))
        assert_all_ranks(comm, trainer.observation == {"other": 1})
        last = comm.rank == comm.size - 1
        aggregate(trainer.next({"validation/loss": 3.0} if last else {}))
        ok = trainer.observation == {"validation/loss": 3.0}
        assert_all_ranks(comm, ok, f"{trainer.observation}")
    custom = ObservationAggregator(comm, "loss", aggregator=lambda all: [map(len, all)])
    custom(trainer.next({}))
    assert_all_ranks(comm, trainer.observation == {})


@pytest.mark.parallel([2, 3])
def test_an_aggregator_of_ones_own(comm):
    """It gets one list for each rank, of what was observed since the last exchange."""
    seen = []

    def largest(histories):
        seen.append(histories)
        return max(max(history, default=0) for history in histories)

    aggregate = ObservationAggregator(
        comm, "loss", comm_trigger=(2, "iteration"), aggregator=largest
    )
    trainer = FakeTrainer()
    for i in range(1, 5):
        observation = {"loss": np.array(10.0 * i + comm.rank)}
        if i == 3 and comm.rank == 0:
            observation = {}
        aggregate(trainer.next(observation))
        if i % 2 == 0:
            expected = 10.0 * i + comm.size - 1
            assert_all_ranks(comm, trainer.observation["loss"] == expected)
    histories = [[[30.0 + r, 40.0 + r] if r else [40.0] for r in range(comm.size)]]
    assert_all_ranks(comm, comm.rank != 0 or seen[1:] == histories, f"{seen}")
    assert_all_ranks(comm, comm.rank == 0 or seen == [])


@pytest.mark.parallel([2, 3])
def test_arrays_are_averaged_element_by_element(comm):
    aggregate = ObservationAggregator(comm, "vector")
    trainer = FakeTrainer().next(
        {"vector": chainer.Variable(np.full(2, comm.rank, "f"))}
    )
    aggregate(trainer)
    found = trainer.observation["vector"]
    ok = isinstance(found, np.ndarray) and (found == (comm.size - 1) / 2).all()
    assert_all_ranks(comm, bool(ok), f"{found}")


@pytest.mark.parallel([2, 3])
def test_mistakes_are_errors_on_all_ranks(comm):
    def fails(histories):
        raise ZeroDivisionError("no values")

    trainer = FakeTrainer().next({"loss": 1.0})
    aggregate = ObservationAggregator(comm, "loss", aggregator=fails)
    assert_all_raise(comm, lambda: aggregate(trainer), Exception, "no values")
    aggregate = ObservationAggregator(comm, "loss" if comm.rank else "accuracy")
    text = "ObservationAggregator(accuracy)"
    assert_all_raise(comm, lambda: aggregate(trainer), MismatchError, text)
    means = AggregateObservations(comm, weight=lambda t: 1 / (comm.rank - 1))
    assert_all_raise(comm, lambda: means(trainer), Exception, "division by zero")
    means = AggregateObservations(comm)
    assert_all_raise(comm, lambda: means(trainer), TypeError, "give weight=")
    means = AggregateObservations(comm, ["loss"] if comm.rank else None)
    means.weight = lambda trainer: 1
    assert_all_raise(comm, lambda: means(trainer), MismatchError, "keys=None on rank 0")
    with pytest.raises(TypeError, match="list of names"):
        AggregateObservations(comm, "loss")


@pytest.mark.parallel([2, 3])
def test_weights(comm):
    """Values of weight 0 count only where there are no others."""
    last = comm.rank == comm.size - 1
    trainer = FakeTrainer().next(
        {
            "a": float(comm.rank),
            "equal": 0.1,
            "nan": np.nan if last else 2.0,
            "only last": chainer.Variable(np.array(5.0)) if last else "no number",
            "vector": np.arange(2),
        }
    )
    AggregateObservations(comm, weight=lambda t: 0 if last else comm.rank + 1)(trainer)
    weights = np.arange(1, comm.size)
    found = trainer.observation
    assert (found.pop("vector") == [0, 1]).all()
    expected = {
        "a": np.average(np.arange(comm.size - 1), weights=weights),
        "equal": 0.1,
        "nan": 2.0,
        "only last": 5.0,
    }
    ok = found == expected and all(type(v) is float for v in found.values())
    assert_all_ranks(comm, ok, f"{found}")


class Reports(MLP):
    """Reports the mean of its batch."""

    def forward(self, x):
        chainer.report({"loss": chainer.functions.mean(x)}, self)
        return chainer.functions.sum(self.l2.b * 0)


def run_trainer(comm, data, out, batch_size, *extensions, **options):
    iterator = chainer.iterators.SerialIterator(
        data, batch_size, shuffle=False, **options
    )
    optimizer = chainer.optimizers.SGD(0).setup(Reports())
    n_batches = -(-len(data) // batch_size)
    updater = StandardUpdater(iterator, optimizer)
    trainer = Trainer(updater, (n_batches, "iteration"), out=str(out))
    seen = []
    trainer.extend(chainer_extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(lambda t: seen.append(dict(t.observation)), name="seen")
    for extension in extensions:
        trainer.extend(extension)
    trainer.run()
    log = json.loads((pathlib.Path(out) / "log").read_text())
    return [entry["main/loss"] for entry in log], seen


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainer#6974", "Lightning-AI/pytorch-lightning#12407")
def test_the_log_holds_means_of_all_ranks(comm, tmp_path):
    """Weighted by samples; the last batch of the last rank is a short one."""
    last = comm.rank == comm.size - 1
    data = np.full((4 if last else 6, 5), 1 + 2 * comm.rank, "f")
    log, seen = run_trainer(
        comm, data, tmp_path, 3, AggregateObservations(comm), repeat=False
    )
    values = 1 + 2 * np.arange(comm.size)
    expected = [values.mean(), np.average(values, weights=[3] * (comm.size - 1) + [1])]
    ok = np.allclose(log, expected)
    ok = ok and all(type(obs["main/loss"]) is float for obs in seen)
    assert_all_ranks(comm, bool(ok), f"{log} {expected} {seen}")


@pytest.mark.parallel([1, 2])
def test_batches_across_the_end_of_an_epoch_count_whole(comm, tmp_path):
    data = np.arange(20, dtype="f").reshape(4, 5) * (1 + comm.rank)
    counted = []
    means = AggregateObservations(comm)
    count = means.weight
    means.weight = lambda trainer: counted.append(count(trainer)) or counted[-1]
    run_trainer(comm, data, tmp_path, 3, means, repeat=True)
    assert_all_ranks(comm, counted == [3, 3], f"{counted}")


@pytest.mark.parallel([1, 2])
def test_a_resumed_run_aggregates_what_the_unbroken_one_does(comm):
    """Through a file of Chainer's, at each iteration between two exchanges."""
    values = {
        "float": lambda i: 0.1 * i + comm.rank / 3,
        "array": lambda i: np.array([0.1, 0.2], "f") * (i + comm.rank),
        "mixed": lambda i: 0.1 * i if i % 2 else np.float64(i) * (1 + 1j),
    }

    def new(key):
        return ObservationAggregator(comm, key, "mean", comm_trigger=(3, "iteration"))

    def run(aggregate, key, begin, end):
        found = []
        for i in range(begin, end):
            trainer.iteration = i
            aggregate(trainer.next({key: values[key](i)}))
            found.append(repr(trainer.observation.get("mean")))
        return found

    trainer = FakeTrainer()
    for key in values:
        expected = run(new(key), key, 0, 7)
        for cut in (2, 3, 4):
            first, second = new(key), new(key)
            found = run(first, key, 0, cut)
            load(saved(first), second)
            found += run(second, key, cut, 7)
            assert_all_ranks(comm, found == expected, f"{cut}: {found} {expected}")


@pytest.mark.parallel([1, 2])
def test_what_snapshots_of_observations_lack_is_warned_of(comm):
    aggregate = ObservationAggregator(comm, "a", comm_trigger=(9, "iteration"))
    for value in ("text", 2.0, [1, [2]]):
        aggregate(FakeTrainer().next({"a": value}))
    with pytest.warns(UserWarning, match="2 values are neither numbers nor arrays"):
        snapshot = saved(aggregate)
    loaded = ObservationAggregator(comm, "a")
    load(snapshot, loaded)
    assert loaded.observation_history == [2.0]
    with pytest.warns(UserWarning, match=r"not hold what ObservationAggregator\(a\)"):
        load(saved(AggregateObservations(comm)), loaded)
