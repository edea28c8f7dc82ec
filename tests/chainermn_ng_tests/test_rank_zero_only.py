"""Extensions on rank 0 alone, and snapshots that fit all ranks."""

import io

import chainer
import numpy as np
import pytest
from chainer.training import StandardUpdater, Trainer, extension, make_extension
from chainer.training import extensions as chainer_extensions
from helpers.chainer_models import MLP, batches
from helpers.ranks import assert_all_ranks

from chainermn_ng import extensions
from chainermn_ng.extensions import rank_zero_only


class Recorder(extension.Extension):
    """Writes down what the trainer asks of it."""

    trigger = 2, "iteration"
    priority = 123
    default_name = "recorder"

    def __init__(self, calls):
        self.calls = calls
        self.state = 0

    def initialize(self, trainer):
        self.calls.append("initialize")

    def __call__(self, trainer):
        self.calls.append(trainer.updater.iteration)

    def finalize(self):
        self.calls.append("finalize")

    def on_error(self, trainer, exc, tb):
        self.calls.append("on_error")

    def serialize(self, serializer):
        self.state = serializer("state", self.state)


def new_trainer(out, n_iterations=4):
    x, t = batches(1, 4)[0]
    data = chainer.datasets.TupleDataset(x, t)
    iterator = chainer.iterators.SerialIterator(data, 2, shuffle=False)
    optimizer = chainer.optimizers.SGD(0.1).setup(MLP())
    updater = StandardUpdater(iterator, optimizer)
    return Trainer(updater, (n_iterations, "iteration"), out=str(out))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("how", ["job", "comm", "engine", "mpi4py"])
def test_other_ranks_do_nothing(comm, tmp_path, how):
    given = {"job": None, "comm": comm, "engine": comm.engine, "mpi4py": comm.mpi_comm}
    calls = []
    mine = Recorder(calls)
    found = rank_zero_only(mine, given[how])
    assert_all_ranks(comm, (found is mine) == (comm.rank == 0))
    trainer = new_trainer(tmp_path)
    trainer.extend(found)
    trainer.extend(rank_zero_only(lambda t: calls.append("f"), comm), name="function")
    entry = trainer._extensions["recorder"]
    assert (entry.priority, entry.trigger.period) == (123, 2)
    trainer.run()
    expected = (
        ["initialize", "f", 2, "f", "f", 4, "f", "finalize"] if comm.rank == 0 else []
    )
    assert_all_ranks(comm, calls == expected, f"{calls}")


@pytest.mark.parallel([2])
def test_an_error_does_not_reach_it_either(comm, tmp_path):
    calls = []
    trainer = new_trainer(tmp_path)
    trainer.extend(rank_zero_only(Recorder(calls)), trigger=(1, "iteration"))

    @make_extension(priority=0, default_name="fails")
    def fails(trainer):
        raise ArithmeticError("it does")

    trainer.extend(fails)
    with pytest.raises(ArithmeticError):
        trainer.run(show_loop_exception_msg=False)
    expected = ["initialize", 1, "on_error", "finalize"] if comm.rank == 0 else []
    assert_all_ranks(comm, calls == expected, f"{calls}")


@pytest.mark.parallel([1, 2])
def test_names_are_those_of_the_extension(comm, tmp_path):
    def plain(trainer):
        pass

    trainer = new_trainer(tmp_path)
    for extension_ in (
        plain,
        Recorder([]),
        Recorder([]),
        chainer_extensions.LogReport(),
    ):
        trainer.extend(rank_zero_only(extension_))
    named = Recorder([])
    named.name = "mine"
    trainer.extend(rank_zero_only(named))
    decorated = make_extension(trigger=(3, "epoch"), default_name="decorated")(
        lambda t: None
    )
    trainer.extend(rank_zero_only(decorated))
    names = ["plain", "recorder", "recorder_1", "LogReport", "mine", "decorated"]
    assert_all_ranks(comm, list(trainer._extensions) == names)
    assert trainer._extensions["decorated"].trigger.unit == "epoch"
    assert trainer.get_extension("LogReport").log == []


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainermn#76", "chainer/chainer#8003")
def test_snapshots_of_every_rank_can_be_loaded_by_every_rank(comm, tmp_path):
    out = io.StringIO()

    def build():
        trainer = new_trainer(tmp_path / f"{comm.rank}", 4)
        trainer.extend(
            rank_zero_only(chainer_extensions.LogReport(trigger=(1, "iteration")))
        )
        report = chainer_extensions.PrintReport(["main/loss"], out=out)
        trainer.extend(rank_zero_only(report), trigger=(2, "iteration"))
        recorder = Recorder([])
        trainer.extend(rank_zero_only(recorder))
        return trainer, recorder

    trainer, recorder = build()
    recorder.state = 5
    trainer.run()
    printed = out.getvalue()
    ok = ("main/loss" in printed) == (comm.rank == 0)
    ok = ok and (tmp_path / f"{comm.rank}" / "log").exists() == (comm.rank == 0)
    assert_all_ranks(comm, ok, printed)
    file = io.BytesIO()
    chainer.serializers.save_npz(file, trainer)
    for snapshot in comm.allgather_obj(file.getvalue()):
        loaded, recorder = build()
        chainer.serializers.load_npz(io.BytesIO(snapshot), loaded)
        ok = loaded.updater.iteration == 4 and int(np.asarray(recorder.state)) == 5
        assert_all_ranks(comm, ok)
        loaded.stop_trigger = chainer.training.get_trigger((6, "iteration"))
        loaded.run()
        assert_all_ranks(comm, loaded.updater.iteration == 6)


def collective_extensions(comm):
    """Return how each name of the package makes what all ranks must run."""

    def iterator():
        return chainer.iterators.SerialIterator([1, 2], 1, repeat=False)

    def evaluator():
        return chainer_extensions.Evaluator(iterator(), MLP())

    def snapshot():
        return chainer_extensions.snapshot()

    new = extensions
    return {
        "AggregateObservations": lambda: new.AggregateObservations(comm),
        "AllreducePersistent": lambda: new.AllreducePersistent(MLP(), comm),
        "CheckState": new.CheckState,
        "FlushGradients": new.FlushGradients,
        "GenericMultiNodeEvaluator": lambda: new.GenericMultiNodeEvaluator(
            comm, iterator(), MLP()
        ),
        "MultiNodeCheckpointer": lambda: new.MultiNodeCheckpointer(
            "a", comm, 1, 1, None
        ),
        "MultiNodeEarlyStoppingTrigger": lambda: new.MultiNodeEarlyStoppingTrigger(
            comm
        ),
        "Timeline": lambda: new.Timeline(comm),
        "MultiNodeSnapshot": lambda: new.MultiNodeSnapshot(comm, snapshot(), []),
        "ObservationAggregator": lambda: new.ObservationAggregator(comm, "loss"),
        "create_multi_node_checkpointer": lambda: new.create_multi_node_checkpointer(
            "a", comm
        ),
        "create_multi_node_evaluator": lambda: new.create_multi_node_evaluator(
            evaluator(), comm
        ),
        "multi_node_snapshot": lambda: new.multi_node_snapshot(comm, snapshot(), []),
    }


@pytest.mark.parallel([1, 2])
def test_what_all_ranks_must_run_is_refused(comm):
    makers = collective_extensions(comm)
    # One that is new must be added here, or be named as one that a rank may run alone.
    assert set(makers) == set(extensions.__all__) - {"rank_zero_only"}
    for name, make in makers.items():
        with pytest.raises(ValueError, match="all ranks together"):
            pytest.fail(f"{name} was accepted: {rank_zero_only(make())}")
    with pytest.raises(TypeError, match="no extension"):
        rank_zero_only("LogReport")


@pytest.mark.parallel([1, 2])
def test_triggers_that_all_ranks_must_ask(comm, tmp_path):
    """The trainer asks them on all ranks; an extension asks its own on one only."""

    def trigger():
        return extensions.MultiNodeEarlyStoppingTrigger(
            comm, check_trigger=(1, "iteration"), patience=1, monitor="loss"
        )

    with pytest.raises(ValueError, match="MultiNodeEarlyStoppingTrigger works with"):
        rank_zero_only(chainer_extensions.LogReport(trigger=trigger()))
    calls = []
    recorder = Recorder(calls)
    recorder.trigger = trigger()
    trainer = new_trainer(tmp_path, 3)
    trainer.extend(lambda t: t.observation.update(loss=1.0), name="loss", priority=500)
    trainer.extend(rank_zero_only(recorder))
    trainer.run()
    expected = ["initialize", 2, 3, "finalize"] if comm.rank == 0 else []
    assert_all_ranks(comm, calls == expected, f"{calls}")
