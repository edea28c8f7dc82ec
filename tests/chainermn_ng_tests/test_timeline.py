"""The extension ``Timeline``: recorded steps of a training on several ranks."""

from __future__ import annotations

import time
import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import training
from chainer.training import extension
from helpers.chainer_models import MLP, batches, part
from helpers.errors import assert_all_raise, raised_by
from helpers.ranks import assert_all_ranks
from helpers.traces import faults, load, spans_of
from helpers.trainings import make_trainer, names_in, shared_folder, state_of
from mpi4py import MPI

import chainermn_ng
import communicators
from chainermn_ng.extensions import FlushGradients, Timeline, rank_zero_only
from chainermn_ng.timeline.clocks import CommonClock, read_clock
from chainermn_ng.timeline.summary import summarise
from chainermn_ng.timeline.trace_files import read_trace
from communicators import MismatchError
from communicators.buckets import plan_buckets

PHASES = ["data", "forward", "backward", "average", "update", "after update"]


class Watch(extension.Extension):
    """Notes in which iterations a recorder listens; runs before Timeline."""

    trigger = 1, "iteration"

    def __init__(self, engine, seen):
        self.engine, self.seen = engine, seen

    def __call__(self, trainer):
        if self.engine.recorder is not None:
            self.seen.append(trainer.updater.iteration)


def train(comm, folder, n_iterations=6, snapshots=None, **timeline):
    trainer = make_trainer(comm, folder, n_iterations)
    seen = []
    trainer.extend(Watch(comm.engine, seen))
    trainer.extend(Timeline(comm, **timeline))
    if snapshots is not None:
        checkpointer = chainermn_ng.create_multi_node_checkpointer(
            "run", comm, path=str(snapshots)
        )
        trainer.extend(checkpointer, trigger=(4, "iteration"))
        checkpointer.maybe_load(trainer)
    trainer.run()
    return trainer, seen


def events_in(comm, path):
    """The events of a file that rank 0 has written, on all ranks."""
    comm.barrier()
    return load(path)["traceEvents"]


@pytest.mark.parallel([1, 2, 3])
def test_a_training_is_recorded_in_its_steps_and_only_there(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer, seen = train(comm, folder, steps=range(3, 5))
    events = events_in(comm, folder / "timeline.json")
    ok = seen == [3, 4] and faults(events) == [] and comm.engine.recorder is None
    assert_all_ranks(comm, ok, f"{seen} {faults(events)}")
    for rank in range(comm.size):
        for phase in PHASES:
            found = [e["args"]["step"] for e in spans_of(events, phase, rank)]
            assert found == [3, 4], (phase, rank)
        for step in (3, 4):
            (whole,) = spans_of(events, f"step {step}", rank)
            of_step = [e for e in events if e.get("args", {}).get("step") == step]
            for e in [e for e in of_step if e["pid"] == rank and e["tid"] == 0]:
                assert whole["ts"] - 1e-3 <= e["ts"]
                assert e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1e-3
    # Nothing is different for having been watched.
    alone = make_trainer(comm, folder, 6)
    alone.run()
    assert_all_ranks(comm, state_of(alone) == state_of(trainer))


@pytest.mark.parallel([2, 3])
def test_ranks_share_a_clock(comm, tmp_path):
    """No rank's average ends before another's has begun: they have met in it."""
    folder = shared_folder(comm, tmp_path)
    train(comm, folder, steps=range(2, 6))
    events = events_in(comm, folder / "timeline.json")
    averages = [spans_of(events, "average", rank) for rank in range(comm.size)]
    for of_step in zip(*averages, strict=True):
        last_begin = max(e["ts"] for e in of_step)
        first_end = min(e["ts"] + e["dur"] for e in of_step)
        assert last_begin < first_end


@pytest.mark.parallel([2, 3])
def test_clocks_of_different_hosts_are_compared(comm):
    engine = comm.engine
    engine.real_host = comm.rank
    shift = 10**12 * comm.rank

    def clock():
        return time.perf_counter_ns() + shift

    reading = read_clock(engine, clock)
    off = reading.offset_ns + shift
    assert_all_ranks(comm, abs(off) <= reading.error_ns, f"{off} {reading}")
    assert_all_ranks(comm, (reading.error_ns > 0) == (comm.rank > 0), f"{reading}")
    common = CommonClock(0, [reading])
    times = comm.allgather_obj(common.of(clock()))
    assert max(times) - min(times) < 10 * 10**9
    # On one host there is nothing to compare.
    engine.real_host = 0
    assert_all_ranks(comm, read_clock(engine, clock).offset_ns == 0)


def buckets_of(model, bucket_bytes):
    """Bytes of the buckets in which the gradients of a model have to travel."""
    parameters = [p for _, p in sorted(model.namedparams())]
    sizes = [(i, p.size, p.dtype) for i, p in enumerate(parameters)]
    return [bucket.nbytes for bucket in plan_buckets(sizes, bucket_bytes, cuts=True)]


@pytest.mark.parallel([2, 3])
def test_every_bucket_that_was_sent_is_there(tmp_path):
    # Hosts of one rank: in one host nothing is packed.
    with communicators.create_communicator(
        "flat", topology="+".join("1" * MPI.COMM_WORLD.size), bucket_bytes=64
    ) as engine:
        comm = chainermn_ng.communicators.ChainerCommunicator(engine)
        folder = shared_folder(comm, tmp_path)
        trainer = make_trainer(comm, folder, 4)
        trainer.extend(Timeline(comm, [2, 4], "buckets.json.gz"))
        trainer.run()
        events = events_in(comm, folder / "buckets.json.gz")
        expected = buckets_of(trainer.updater.get_optimizer("main").target, 64)
        ok = faults(events) == [] and len(expected) > 2
        for rank in range(comm.size):
            flights = spans_of(events, "flight", rank)
            for step in (2, 4):
                own = [e["args"] for e in flights if e["args"]["step"] == step]
                found = {a["bucket"]: a["nbytes"] for a in own}
                ok = ok and found == dict(enumerate(expected))
                ok = ok and len(own) == len(expected)
            for name, n in (("pack", len(expected)), ("agreement", 1)):
                ok = ok and len(spans_of(events, name, rank)) == 2 * n
        assert_all_ranks(comm, ok, f"{faults(events)} {expected}")


@pytest.mark.parallel([2, 3])
def test_in_one_host_arrays_are_reduced_in_place(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    train(comm, folder, steps=3)
    events = events_in(comm, folder / "timeline.json")
    for rank in range(comm.size):
        (reduce,) = spans_of(events, "reduce", rank)
        (average,) = spans_of(events, "average", rank)
        assert average["ts"] <= reduce["ts"]
        assert reduce["ts"] + reduce["dur"] <= average["ts"] + average["dur"]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_every_rank_can_write_a_file_of_its_own(comm, tmp_path, double_buffering):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder, 5, double_buffering=double_buffering)
    trainer.extend(FlushGradients())
    trainer.extend(Timeline(comm, 2, "t{rank}.json"))
    trainer.run()
    comm.barrier()
    assert names_in(folder) == [f"t{rank}.json" for rank in range(comm.size)]
    content = load(folder / f"t{comm.rank}.json")
    header = content["otherData"]["chainermn_ng_timeline"]
    ok = header["ranks"] == [comm.rank] and header["steps"] == [2]
    ok = ok and faults(content["traceEvents"]) == []
    ok = ok and len(spans_of(content["traceEvents"], "update", comm.rank)) == 1
    assert_all_ranks(comm, ok, f"{header}")
    assert len(set(comm.allgather_obj(header["run"]))) == 1


@pytest.mark.parallel([1, 2])
def test_a_run_that_is_resumed_records_what_is_left(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    snapshots = folder / "snapshots"
    whole, _ = train(comm, folder / "whole", 6, steps=range(4, 7))
    _, first = train(comm, folder / "one", 4, snapshots, steps=range(4, 7))
    comm.barrier()
    header = load(folder / "one/timeline.json")["otherData"]["chainermn_ng_timeline"]
    # The run was over before the last of the steps.
    assert header["steps"] == [4]
    resumed, second = train(comm, folder / "two", 6, snapshots, steps=range(4, 7))
    events = events_in(comm, folder / "two/timeline.json")
    found = [e["args"]["step"] for e in spans_of(events, "forward", 0)]
    ok = (first, second, found) == ([4], [5, 6], [5, 6])
    same = state_of(resumed) == state_of(whole)
    assert_all_ranks(comm, ok and same, f"{first} {second} {found} {same}")
    # All of them are over: nothing is recorded, and nothing written.
    _, third = train(comm, folder / "three", 6, snapshots, steps=range(1, 5))
    assert_all_ranks(comm, third == [], f"{third}")
    comm.barrier()
    assert "timeline.json" not in names_in(folder / "three")


class Own(training.updaters.StandardUpdater):
    """Computes gradients by itself, with two optimizers."""

    def update_core(self):
        x, t = self.converter(self.get_iterator("main").next(), None)
        for name in ("one", "two"):
            optimizer = self.get_optimizer(name)
            loss = optimizer.target(x, t)
            optimizer.target.cleargrads()
            loss.backward()
            optimizer.update()


class Still(training.updaters.StandardUpdater):
    """Has an optimizer that knows no other ranks."""

    def update_core(self):
        batch = self.converter(self.get_iterator("main").next(), None)
        self.get_optimizer("one").actual_optimizer.update(
            self.get_optimizer("one").target, *batch
        )


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("updater_class", [Own, Still])
def test_any_updater_can_be_watched(comm, tmp_path, updater_class):
    folder = shared_folder(comm, tmp_path)
    optimizers = {}
    for name in ("one", "two"):
        model = MLP()
        comm.bcast_data(model)
        optimizers[name] = chainermn_ng.create_multi_node_optimizer(
            chainer.optimizers.SGD(0.1), comm
        ).setup(model)
    data = chainer.datasets.TupleDataset(*batches(1, 8)[0])
    iterator = chainer.iterators.SerialIterator(data, 2, shuffle=False)
    updater = updater_class(iterator, optimizers)
    trainer = training.Trainer(updater, (4, "iteration"), out=str(folder))
    trainer.extend(Timeline(comm, [2, 3]))
    trainer.run()
    events = events_in(comm, folder / "timeline.json")
    names = {e["name"] for e in events if e["ph"] == "X"}
    n_updates = len(spans_of(events, "update", comm.rank))
    if updater_class is Own:
        expected = {"step 2", "step 3", "average", "update"}
        expected |= {"before update", "after update"}
        ok = expected <= names and "data" not in names and n_updates == 4
    else:
        ok = names == {"step 2", "step 3"}
    assert_all_ranks(comm, ok and faults(events) == [], f"{names} {n_updates}")


@pytest.mark.parallel([1, 2])
def test_a_loop_of_ones_own_is_recorded(comm, tmp_path, monkeypatch):
    folder = shared_folder(comm, tmp_path)
    monkeypatch.chdir(folder)
    model = MLP()
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm
    ).setup(model)
    timeline = Timeline(comm, [2, 3, 9])
    seen = []
    for batch in batches(4, 4 * comm.size):
        with timeline.step():
            seen.append(comm.engine.recorder is not None)
            optimizer.update(model, *part(comm, batch))
    assert_all_ranks(comm, seen == [False, True, True, False], f"{seen}")
    assert comm.engine.recorder is None
    timeline.write()
    events = events_in(comm, folder / "timeline.json")
    for rank in range(comm.size):
        found = [e["args"]["step"] for e in spans_of(events, "backward", rank)]
        assert found == [2, 3]
    comm.barrier()
    # All has been written.
    (folder / "timeline.json").unlink(missing_ok=True)
    timeline.write()
    assert names_in(folder) == []
    # The last of the steps writes by itself.
    timeline = Timeline(comm, 1, "last.json")
    with timeline.step():
        comm.barrier()
    comm.barrier()
    assert names_in(folder) == ["last.json"]


@pytest.mark.parallel([1, 2])
def test_an_error_in_the_training_leaves_nothing_behind(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    def fail(_):
        raise KeyError("mine")

    for filename, expected in (("timeline.json", []), ("{rank}.json", [comm.rank])):
        trainer = make_trainer(comm, folder, 4)
        trainer.extend(Timeline(comm, range(1, 5), filename))
        trainer.extend(fail, trigger=(2, "iteration"), name="fail")
        error = raised_by(lambda t=trainer: t.run(show_loop_exception_msg=False))
        ok = isinstance(error, KeyError) and comm.engine.recorder is None
        ok = ok and (f"{comm.rank}.json" in names_in(folder)) == bool(expected)
        ok = ok and "timeline.json" not in names_in(folder)
        assert_all_ranks(comm, ok, f"{error!r} {names_in(folder)}")
    steps = load(folder / f"{comm.rank}.json")["otherData"]["chainermn_ng_timeline"]
    assert_all_ranks(comm, steps["steps"] == [1], f"{steps}")
    timeline = Timeline(comm, 1)

    def step():
        with timeline.step():
            fail(None)

    error = raised_by(step)
    ok = isinstance(error, KeyError) and comm.engine.recorder is None
    assert_all_ranks(comm, ok, f"{error!r}")


@pytest.mark.parallel(2)
def test_ranks_that_differ_get_an_error(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    def one_rank_alone():
        trainer = make_trainer(comm, folder, 4)
        if comm.rank == 0:
            trainer.extend(Timeline(comm, 2))
        trainer.run(show_loop_exception_msg=False)

    assert_all_raise(comm, one_rank_alone, MismatchError, "Timeline")

    def other_steps():
        trainer = make_trainer(comm, folder, 4)
        trainer.extend(Timeline(comm, [2, 3 + comm.rank]))
        trainer.run(show_loop_exception_msg=False)

    assert_all_raise(comm, other_steps, MismatchError, "Timeline", "steps [2, 3]")
    assert comm.engine.recorder is None


@pytest.mark.parallel([1, 2])
def test_what_cannot_be_written_is_an_error_of_all(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    if comm.rank == 0:
        (folder / "taken").mkdir()
    comm.barrier()

    def run():
        trainer = make_trainer(comm, folder, 3)
        trainer.extend(Timeline(comm, 2, "taken"))
        trainer.run(show_loop_exception_msg=False)

    assert_all_raise(comm, run, OSError, "taken")

    def unknown_to_json():
        timeline = Timeline(comm, 1, str(folder / "t.json"))
        with timeline.step():
            comm.engine.recorder.record("mine", 1, 2, "main", array=np.zeros(2))

    assert_all_raise(comm, unknown_to_json, TypeError, "ndarray")
    assert names_in(folder) == ["taken"]


@pytest.mark.parallel([1, 2])
def test_a_missing_folder_is_an_error_of_all_at_once(comm, tmp_path):
    path = shared_folder(comm, tmp_path) / "no"
    for name in (path / "t.json", str(path / "{rank}.json")):
        assert_all_raise(
            comm, lambda n=name: Timeline(comm, 1, n), OSError, "there is no folder"
        )
    # Folders within the trainer's are made.
    trainer = make_trainer(comm, path, 2)
    trainer.extend(Timeline(comm, 1, "sub/t.json"))
    trainer.run()
    comm.barrier()
    assert names_in(path / "sub") == ["t.json"]


@pytest.mark.parallel([1, 2])
def test_steps_that_never_come_are_told_once(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    def watched(function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        return [str(w.message) for w in caught if "Timeline" in str(w.message)]

    words = "Timeline: no step was recorded, and nothing is written: the training has "
    expected = [f"{words}ended before steps [10, 11, 12]"] if comm.rank == 0 else []
    told = watched(lambda: train(comm, folder, 2))
    assert_all_ranks(comm, told == expected, f"{told}")
    timeline = Timeline(comm)

    def loop():
        with timeline.step():
            comm.barrier()
        timeline.write()
        timeline.write()

    told = watched(loop)
    assert_all_ranks(comm, told == expected, f"{told}")
    assert names_in(folder) == []


@pytest.mark.parallel([1, 2])
def test_one_timeline_at_a_time(comm):
    first, second = Timeline(comm, 1), Timeline(comm, 1)

    def both():
        with first.step(), second.step():
            pass

    assert_all_raise(comm, both, ValueError, "has a recorder already")
    assert comm.engine.recorder is None


@pytest.mark.parallel(1)
def test_arguments_are_checked(comm):
    for steps in ([], 0, [3, -1], range(0)):
        with pytest.raises(ValueError, match="expected one or more, counted from 1"):
            Timeline(comm, steps)
    for steps in (2.5, [1, "2"], "10", None):
        with pytest.raises(TypeError, match="expected a whole number or several"):
            Timeline(comm, steps)
    for name, error, words in (
        ("t{foo}.json", ValueError, r"unknown {foo}; there is {rank}"),
        ("", ValueError, "expected the name of a file"),
        (7, TypeError, "expected a text"),
        (b"t.json", TypeError, "expected a text"),
    ):
        with pytest.raises(error, match=words):
            Timeline(comm, 1, name)
    assert Timeline(comm, np.int64(3))._steps == [3]
    with pytest.raises(TypeError, match="expected a communicator"):
        Timeline(comm.mpi_comm)
    with pytest.raises(ValueError, match="works with all ranks together"):
        rank_zero_only(Timeline(comm))
    assert Timeline(comm.engine, 3)._steps == [3]


class Slow(chainer.FunctionNode):
    """Takes its time in the backward pass."""

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        time.sleep(0.1)
        return gradients


@pytest.mark.parallel(2)
def test_what_travels_during_the_backward_pass_is_shown_there(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    model = MLP()
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, overlap=True, overlap_bytes=1
    ).setup(model)

    def loss(x, t):
        h = Slow().apply((F.tanh(model.l1(x)),))[0]
        return F.softmax_cross_entropy(model.l2(h), t)

    timeline = Timeline(comm, [2, 3], str(folder / "timeline.json"))
    for batch in batches(3, 8):
        with timeline.step():
            optimizer.update(loss, *part(comm, batch))
    comm.barrier()
    trace = read_trace(folder / "timeline.json")
    assert faults(trace.events) == []
    for rank in summarise(trace).ranks:
        backward = spans_of(trace.events, "backward", rank.rank)
        reduces = spans_of(trace.events, "reduce", rank.rank)
        # One a gradient: two layers, a weight and a bias each.
        assert len(reduces) == 2 * 4
        ends = [end_of(e) for e in reduces[:2]]
        assert backward[0]["ts"] < min(ends) < end_of(backward[0])
        assert rank.exposed_s < rank.phases_s["average"] + rank.phases_s["reduce"]


def end_of(event):
    return event["ts"] + event["dur"]
