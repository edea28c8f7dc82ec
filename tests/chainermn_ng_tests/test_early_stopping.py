import warnings

import chainer
import numpy as np
import pytest
from chainer import iterators
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.extensions import MultiNodeEarlyStoppingTrigger
from communicators import MismatchError


class Updater(chainer.training.StandardUpdater):
    """Reports given values instead of training; 4 iterations an epoch."""

    def __init__(self, values, key):
        link = chainer.Chain()
        super().__init__(
            iterators.SerialIterator(list(range(8)), 2),
            chainer.optimizers.SGD(0.1).setup(link),
        )
        self.values = values
        self.key = key

    def update_core(self):
        next(self._iterators["main"])
        value = self.values(self.iteration)
        if value is not None:
            chainer.report({self.key: value})


def trainer_of(comm, values, key="main/loss", **kwargs):
    kwargs.setdefault("max_trigger", (10, "epoch"))
    trigger = MultiNodeEarlyStoppingTrigger(comm, monitor=key, **kwargs)
    return chainer.training.Trainer(Updater(values, key), trigger, out="unused")


def last_iteration(comm, values, **kwargs):
    trainer = trainer_of(comm, values, **kwargs)
    trainer.run()
    ends = comm.allgather_obj(trainer.updater.iteration)
    assert len(set(ends)) == 1, ends
    return ends[0]


def from_list(values):
    """Return the value of each epoch, and the last one from there on."""
    return lambda iteration: values[min(iteration // 4, len(values) - 1)]


@pytest.mark.reports("chainer/chainer#6616")
@pytest.mark.parallel([1, 2, 3])
def test_all_stop_by_the_mean_over_ranks(comm):
    # The means are 5, 4, 3, 3.5, 3.5, ... on all ranks together; the ranks' own values
    # get worse from the first epoch on, or get better for ever.
    middle = (comm.size - 1) / 2
    means = [5, 4, 3, *[3.5] * 7]
    values = [m + (comm.rank - middle) * 3 * k for k, m in enumerate(means)]
    end = last_iteration(comm, from_list(values), patience=2)
    assert_all_ranks(comm, end == 20, f"{end}")
    end = last_iteration(comm, from_list(values), patients=3)
    assert_all_ranks(comm, end == 24, f"{end}")
    # By default three checks without a better value.
    assert_all_ranks(comm, last_iteration(comm, from_list(values)) == 24)


@pytest.mark.reports("chainer/chainer#6616")
@pytest.mark.parallel([1, 2, 3])
def test_nan_on_one_rank_is_no_improvement_on_any(comm):
    last = comm.rank == comm.size - 1
    good = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    values = [float("nan") if last and k in (1, 2) else x for k, x in enumerate(good)]
    end = last_iteration(comm, from_list(values), patience=2)
    assert_all_ranks(comm, end == 12, f"{end}")
    # One epoch of NaN is survived.
    end = last_iteration(comm, from_list(values), patience=3, max_trigger=(6, "epoch"))
    assert_all_ranks(comm, end == 24, f"{end}")
    nans = from_list([float("nan")])
    assert_all_ranks(comm, last_iteration(comm, nans, patience=2) == 8)


@pytest.mark.parallel([1, 2, 3])
def test_modes_and_intervals(comm):
    kwargs = {"key": "main/accuracy", "patience": 1}
    rising = from_list([float(k) for k in range(10)])
    ends = {
        mode: last_iteration(comm, rising, mode=mode, **kwargs)
        for mode in ("auto", "max", "min")
    }
    assert_all_ranks(comm, ends == {"auto": 40, "max": 40, "min": 8}, f"{ends}")
    end = last_iteration(
        comm, from_list([1.0]), patience=3, check_trigger=(2, "iteration")
    )
    assert_all_ranks(comm, end == 8, f"{end}")
    trigger = MultiNodeEarlyStoppingTrigger(comm, max_trigger=(7, "epoch"))
    assert trigger.get_training_length() == (7, "epoch")


@pytest.mark.parallel([1, 2])
def test_the_mean_can_be_seen_and_counts_all_kinds_of_numbers(comm):
    kinds = [np.float32(2), chainer.Variable(np.array(4.0, "f")), np.array(6), 8.0]
    seen = []
    trainer = trainer_of(comm, lambda i: kinds[i % 4], max_trigger=(2, "epoch"))
    run, stop = trainer.run, trainer.stop_trigger

    def look(t):
        result = stop(t)
        seen.append(t.observation.get("main/loss_aggregated"))
        return result

    trainer.stop_trigger = look
    run()
    assert_all_ranks(comm, seen == [*[None] * 4, 5.0, *[None] * 4], f"{seen}")


@pytest.mark.parallel([2, 3])
def test_ranks_without_the_value_add_nothing(comm):
    means = from_list([3.0, 2.0, 2.5, 2.5])
    only_last = means if comm.rank == comm.size - 1 else lambda i: None
    end = last_iteration(comm, only_last, patience=2)
    assert_all_ranks(comm, end == 16, f"{end}")


@pytest.mark.parallel([1, 2])
def test_a_value_that_nobody_reports_is_warned_of(comm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end = last_iteration(comm, lambda i: None, max_trigger=(3, "epoch"))
    texts = [str(w.message) for w in caught if "main/loss" in str(w.message)]
    assert_all_ranks(comm, end == 12 and len(texts) == 2 * (comm.rank == 0), f"{texts}")


@pytest.mark.reports("chainer/chainer#6616")
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("n_iterations", [6, 8])
def test_resume_keeps_best_value_and_patience(comm, n_iterations):
    values = from_list([3.0, 3.5 + comm.rank, 3.5, 3.5, 3.5])
    unbroken = trainer_of(comm, values, patience=3)
    saved = {}

    @unbroken.extend
    def save(trainer):
        if trainer.updater.iteration == n_iterations:
            trainer.serialize(chainer.serializers.DictionarySerializer(saved))

    unbroken.run()
    again = trainer_of(comm, values, patience=3)
    again.serialize(chainer.serializers.NpzDeserializer(saved))
    assert again.updater.iteration == n_iterations
    again.run()
    ends = unbroken.updater.iteration, again.updater.iteration
    assert_all_ranks(comm, ends == (16, 16), f"{ends}")
    ok = again.stop_trigger.actual_trigger.best == 3.0
    assert_all_ranks(comm, ok and again.stop_trigger.actual_trigger.count == 3)
    with pytest.warns(UserWarning, match="best value so far is forgotten"):
        again.stop_trigger.serialize(chainer.serializers.NpzDeserializer({}))


@pytest.mark.parallel([2, 3])
def test_checks_at_different_iterations_are_an_error_on_all(comm):
    trainer = trainer_of(comm, lambda i: 1.0, check_trigger=(2 + comm.rank, "epoch"))

    def run():
        # The others are at a barrier when the first of them checks.
        trainer.run(show_loop_exception_msg=False)
        comm.barrier()

    assert_all_raise(comm, run, MismatchError, "early stopping by main/loss")


@pytest.mark.parallel([1, 2])
def test_mistakes(comm):
    with pytest.raises(TypeError, match="create_communicator"):
        MultiNodeEarlyStoppingTrigger(MPI.COMM_WORLD)
    with pytest.raises(TypeError):
        MultiNodeEarlyStoppingTrigger(comm, patience=1, patients=2)
    with pytest.raises(TypeError):
        MultiNodeEarlyStoppingTrigger(comm, paticence=1)
