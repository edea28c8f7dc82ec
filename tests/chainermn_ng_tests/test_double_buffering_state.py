"""Double buffering: snapshots, copies, several optimizers, and errors."""

import copy
import pickle
import warnings

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions
from helpers.chainer_models import (
    MLP,
    batches,
    part,
    same_on_all_ranks,
    weights,
)
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from helpers.snapshots import load, saved
from helpers.stale_gradients import GradientRecorder

import chainermn_ng
from chainermn_ng.extensions import FlushGradients
from chainermn_ng.optimizers import create_multi_node_optimizer
from communicators import MismatchError


def buffered(comm, model, actual=None, double_buffering=True):
    return create_multi_node_optimizer(
        actual or chainer.optimizers.MomentumSGD(0.1),
        comm,
        double_buffering=double_buffering,
    ).setup(model)


def run(comm, optimizer, data):
    for batch in data:
        optimizer.update(optimizer.target, *part(comm, batch))


def equal_weights(a, b):
    a, b = weights(a), weights(b)
    return list(a) == list(b) and all((a[k] == b[k]).all() for k in a)


# -- snapshots ---------------------------------------------------------------------


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("who_loads", ["all ranks", "rank 0"])
@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_resume_equals_the_run_without_a_break(comm, who_loads, n_before):
    data = batches(6, 12)
    whole = buffered(comm, MLP(0))
    run(comm, whole, data)
    whole.flush()
    first = buffered(comm, MLP(0))
    run(comm, first, data[:n_before])
    snapshots = saved(first), saved(first.target)
    # The run that was saved goes on as if it had not been.
    run(comm, first, data[n_before:])
    first.flush()
    assert_all_ranks(comm, equal_weights(first.target, whole.target), "saving changed")
    second = buffered(comm, MLP(7))
    if who_loads == "all ranks":
        run(comm, second, data[:2])
    if who_loads == "all ranks" or comm.rank == 0:
        load(snapshots[0], second)
        load(snapshots[1], second.target)
    run(comm, second, data[n_before:])
    second.flush()
    ok = second.t == 6 and equal_weights(second.target, whole.target)
    assert_all_ranks(comm, ok, f"t={second.t}")


@pytest.mark.parallel([2])
def test_a_snapshot_taken_on_one_rank_alone(comm):
    data = batches(4, 12)
    optimizer = buffered(comm, MLP(0))
    run(comm, optimizer, data[:3])
    expected = pickle.loads(pickle.dumps(optimizer))
    if comm.rank == 1:
        saved(optimizer)
    run(comm, optimizer, data[3:])
    run(comm, expected, data[3:])
    optimizer.flush()
    expected.flush()
    assert_all_ranks(comm, equal_weights(optimizer.target, expected.target))


@pytest.mark.parallel([2])
def test_the_loss_scale_of_a_gradient_in_flight_is_saved(comm):
    model = chainer.Chain(p=chainer.links.Parameter(np.zeros(2, "f")))

    def loss():
        return chainer.functions.sum(model.p.W)

    optimizer = buffered(comm, model, chainer.optimizers.SGD(1.0))
    optimizer.set_loss_scale(64)
    optimizer.update(loss)
    snapshot = saved(optimizer)
    optimizer.flush()
    model.p.W.array[...] = 0
    optimizer.set_loss_scale(4)
    load(snapshot, optimizer)
    optimizer.flush()
    assert_all_ranks(comm, (model.p.W.array == -1).all(), f"{model.p.W.array}")


@pytest.mark.parallel([1, 2])
def test_a_gradient_that_no_rank_has_is_saved_as_such(comm):
    model = Free()
    optimizer = buffered(comm, model, chainer.optimizers.SGD(1.0))
    model.take_step(optimizer, 1)
    model.cleargrads()
    optimizer.update()  # applies the first; the second is of nothing
    snapshot = saved(optimizer)
    optimizer.flush()
    load(snapshot, optimizer)
    assert optimizer.has_gradient_in_flight
    optimizer.flush()
    ok = (model.a.array == -1).all() and optimizer.t == 2
    assert_all_ranks(comm, ok, f"{model.a.array} {optimizer.t}")


@pytest.mark.parallel([1, 2])
def test_snapshots_of_other_optimizers(comm):
    data = batches(2, 12)
    plain = buffered(comm, MLP(0), double_buffering=False)
    run(comm, plain, data)
    without = saved(plain)
    optimizer = buffered(comm, MLP(0))
    run(comm, optimizer, data)
    with_one = saved(optimizer)
    optimizer.flush()
    with_none = saved(optimizer)
    # A Chainer optimizer's snapshot, or one of no double buffering: nothing in flight.
    for snapshot in (without, with_none, saved(plain.actual_optimizer)):
        run(comm, optimizer, data[:1])
        load(snapshot, optimizer)
        assert not optimizer.has_gradient_in_flight
        assert optimizer.t == 2
    load(with_one, optimizer, strict=False)
    assert optimizer.has_gradient_in_flight
    load(with_none, plain)
    load(with_one, plain.actual_optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(with_one, plain)
    texts = [str(warning.message) for warning in caught]
    ok = len(texts) == (comm.rank == 0) and all("is lost" in text for text in texts)
    assert_all_ranks(comm, ok, f"{texts}")


@pytest.mark.parallel([2, 3])
def test_bcast_state_sends_what_is_in_flight(comm):
    data = batches(4, 12)
    root = comm.size - 1
    expected = buffered(comm, MLP(0))
    run(comm, expected, data[:3])
    optimizer = buffered(comm, MLP(0))
    run(comm, optimizer, data[:3])
    if comm.rank == root:
        snapshots = saved(optimizer), saved(optimizer.target)
    optimizer.flush()
    optimizer.bcast_state()
    run(comm, optimizer, data[:1])
    if comm.rank == root:
        load(snapshots[0], optimizer)
        load(snapshots[1], optimizer.target)
    optimizer.bcast_state(root=root)
    for one in (expected, optimizer):
        run(comm, one, data[3:])
        one.flush()
    ok = equal_weights(optimizer.target, expected.target)
    assert_all_ranks(comm, ok and same_on_all_ranks(comm, optimizer.target))


# -- the trainer -------------------------------------------------------------------


def trainer_of(comm, optimizer, directory, n_epochs):
    x, t = batches(1, 24)[0]
    data = chainer.datasets.TupleDataset(x, t)
    data = chainermn_ng.scatter_dataset(data, comm)
    iterator = chainer.iterators.SerialIterator(data, 4, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (n_epochs, "epoch"), out=str(directory))


@pytest.mark.parallel([1, 2])
def test_a_trainers_snapshot_resumes_and_changes_nothing(comm, tmp_path):
    def new():
        return buffered(comm, MLP(0), chainer.optimizers.Adam(0.02))

    whole = new()
    trainer_of(comm, whole, tmp_path, 4).run()
    first = new()
    trainer = trainer_of(comm, first, tmp_path, 4)
    name = f"snapshot_{comm.rank}"
    trainer.extend(extensions.snapshot(filename=name), trigger=(5, "iteration"))
    trainer.run()
    ok = equal_weights(first.target, whole.target)
    assert_all_ranks(comm, ok, "the snapshot changed the run")
    second = new()
    trainer = trainer_of(comm, second, tmp_path, 4)
    chainer.serializers.load_npz(tmp_path / name, trainer)
    assert second.has_gradient_in_flight
    trainer.run()
    for optimizer in (whole, first, second):
        optimizer.flush()
    ok = equal_weights(second.target, whole.target) and second.t == whole.t
    assert_all_ranks(comm, ok, "the resumed run differs")


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("double_buffering", [True, False])
def test_flush_gradients_in_a_trainer(comm, tmp_path, double_buffering):
    model = MLP(0)
    optimizer = buffered(comm, model, double_buffering=double_buffering)
    trainer = trainer_of(comm, optimizer, tmp_path, 2)
    n_steps = 24 // comm.size // 4
    seen = []

    @training.make_extension(trigger=(1, "epoch"), priority=300)
    def evaluator(trainer):
        seen.append(optimizer.t)

    trainer.extend(evaluator, name="evaluator")
    trainer.extend(FlushGradients())
    trainer.run()
    ok = seen == [n_steps, 2 * n_steps] and optimizer.t == 2 * n_steps
    assert_all_ranks(comm, ok, f"{seen}")


@pytest.mark.parallel([1, 2])
def test_flush_gradients_at_the_end_alone(comm, tmp_path):
    optimizer = buffered(comm, MLP(0))
    trainer = trainer_of(comm, optimizer, tmp_path, 2)
    trainer.extend(FlushGradients(), trigger=(100, "epoch"))
    try:
        raise KeyError("an error that is being handled while the run goes on")
    except KeyError:
        trainer.run()
    n_steps = 2 * 24 // comm.size // 4
    ok = optimizer.t == n_steps and not optimizer.has_gradient_in_flight
    assert_all_ranks(comm, ok, f"{optimizer.t}")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("error_type", [RuntimeError, KeyboardInterrupt])
def test_an_error_on_one_rank_is_not_followed_by_a_flush(comm, tmp_path, error_type):
    optimizer = buffered(comm, MLP(0))
    trainer = trainer_of(comm, optimizer, tmp_path, 2)
    trainer.extend(FlushGradients(), trigger=(100, "epoch"))

    @training.make_extension(trigger=(2, "iteration"))
    def fail(trainer):
        raise error_type("broken")

    trainer.extend(fail, name="fail")
    with pytest.raises(error_type, match="broken"):
        trainer.run(show_loop_exception_msg=False)
    ok = optimizer.t == 1 and optimizer.has_gradient_in_flight
    assert_all_ranks(comm, ok, f"{optimizer.t}")
    optimizer.flush()


# -- copies and several optimizers -------------------------------------------------


@pytest.mark.parallel([2])
def test_copies_take_the_gradient_in_flight_along(comm):
    data = batches(3, 12)
    optimizer = buffered(comm, MLP(0))
    run(comm, optimizer, data[:2])
    # One rank may keep copies that it never uses.
    if comm.rank == 1:
        copy.deepcopy(optimizer)
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for one in (optimizer, *twins):
        assert one.has_gradient_in_flight
        run(comm, one, data[2:])
        one.flush()
        ok = one.t == 3 and same_on_all_ranks(comm, one.target)
        assert_all_ranks(comm, ok, f"{one.t}")
        assert_all_ranks(comm, equal_weights(one.target, optimizer.target))
    assert all(twin.target is not optimizer.target for twin in twins)
    shallow = copy.copy(optimizer)
    assert shallow.target is optimizer.target
    assert shallow.communicator is comm


@pytest.mark.parallel([2, 3])
def test_two_optimizers_take_turns(comm):
    """As in the training of a GAN, with two networks of equal shape."""
    data = batches(5, 12)
    pairs = [[MLP(0), MLP(1)], [MLP(0), MLP(1)]]
    for models, interleaved in zip(pairs, (True, False), strict=True):
        optimizers = [buffered(comm, model) for model in models]
        if interleaved:
            for batch in data:
                for optimizer in optimizers:
                    run(comm, optimizer, [batch])
        else:
            for optimizer in optimizers:
                run(comm, optimizer, data)
        for optimizer in optimizers:
            optimizer.flush()
    for together, apart in zip(*pairs, strict=True):
        ok = equal_weights(together, apart) and same_on_all_ranks(comm, together)
        assert_all_ranks(comm, ok)


@pytest.mark.parallel([2, 3])
def test_a_skipped_step_does_not_mix_two_models(comm):
    data = batches(3, 12)
    optimizers = [buffered(comm, MLP(0)), buffered(comm, MLP(1))]
    expected = [buffered(comm, MLP(0)), buffered(comm, MLP(1))]
    for optimizer in optimizers + expected:
        run(comm, optimizer, data[:2])
    before = [weights(optimizer.target) for optimizer in optimizers]
    chosen = optimizers[1 if comm.rank == 1 else 0]
    assert_all_raise(
        comm,
        lambda: run(comm, chosen, data[2:]),
        MismatchError,
        "optimizer 0 (MomentumSGD), average gradient 3, apply gradient 2",
        "optimizer 1 (MomentumSGD)",
        "rank 1",
    )
    for optimizer, old in zip(optimizers, before, strict=True):
        ok = all((old[k] == v).all() for k, v in weights(optimizer.target).items())
        assert_all_ranks(comm, ok, "the weights moved")
    # The ranks are in step, nothing is lost; the step that failed can be taken.
    for one, other in zip(optimizers, expected, strict=True):
        for optimizer in (one, other):
            run(comm, optimizer, data[2:])
            optimizer.flush()
        assert_all_ranks(comm, equal_weights(one.target, other.target))
        assert_all_ranks(comm, same_on_all_ranks(comm, one.target))


# -- errors ------------------------------------------------------------------------


@pytest.mark.parallel([2, 3])
def test_a_hyperparameter_changed_on_one_rank_is_an_error_on_all(comm):
    data = batches(4, 12)
    optimizer, expected = buffered(comm, MLP(0)), buffered(comm, MLP(0))
    run(comm, expected, data)
    run(comm, optimizer, data[:3])
    before = weights(optimizer.target)
    if comm.rank == 1:
        optimizer.lr = 0.0125
    for call in (lambda: run(comm, optimizer, data[3:]), optimizer.flush):
        assert_all_raise(comm, call, MismatchError, "lr=0.1", "lr=0.0125", "rank 1")
    ok = all((before[k] == v).all() for k, v in weights(optimizer.target).items())
    assert_all_ranks(comm, ok and optimizer.has_gradient_in_flight, "it moved")
    optimizer.lr = 0.1
    run(comm, optimizer, data[3:])
    optimizer.flush()
    expected.flush()
    assert_all_ranks(comm, equal_weights(optimizer.target, expected.target))


@pytest.mark.parallel([2, 3])
def test_a_flush_on_some_ranks_only_is_an_error_on_all(comm):
    optimizer = buffered(comm, MLP(0))
    data = batches(2, 12)
    run(comm, optimizer, data[:1])

    def flush_or_go_on():
        if comm.rank == 1:
            optimizer.flush()
        else:
            run(comm, optimizer, data[1:])

    assert_all_raise(
        comm, flush_or_go_on, MismatchError, "rank 1", "flush: apply gradient 1"
    )
    optimizer.flush()
    assert_all_ranks(comm, same_on_all_ranks(comm, optimizer.target))


class Free(chainer.Chain):
    """Two parameters, whose gradients the tests set."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.zeros(2, "f"))
            self.b = chainer.Parameter(np.zeros(2, "f"))

    def take_step(self, optimizer, gradient):
        for parameter in self.params():
            parameter.grad = np.full(parameter.shape, gradient, parameter.dtype)
        optimizer.update()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("at", ["update", "flush"])
def test_an_error_in_the_background_is_raised_by_the_next_call(comm, at):
    model = Free()
    optimizer = buffered(comm, model, chainer.optimizers.SGD(1.0))
    recorder = GradientRecorder("/a")
    optimizer.add_hook(recorder)
    model.take_step(optimizer, 1)
    optimizer.flush()
    if comm.rank == 1:
        model.b.array = np.zeros(3, "f")
    model.take_step(optimizer, 2)  # begins what must fail
    call = optimizer.flush if at == "flush" else lambda: model.take_step(optimizer, 3)
    assert_all_raise(
        comm,
        call,
        MismatchError,
        "average of gradient 2 in the background",
        "/b: shape (2,) float32",
        "shape (3,) float32 on rank 1",
    )
    assert_all_ranks(comm, recorder.seen == [1] and optimizer.t == 1)
    # Gradient 2 is gone; the ranks are in step and go on.
    assert not optimizer.has_gradient_in_flight
    if comm.rank == 1:
        model.b.array = model.a.array.copy()
    for gradient in (4, 5):
        model.take_step(optimizer, gradient)
    optimizer.flush()
    ok = recorder.seen == [1, 4, 5] and same_on_all_ranks(comm, model)
    assert_all_ranks(comm, ok, f"{recorder.seen}")


@pytest.mark.parallel([2, 3])
def test_a_parameter_reshaped_while_its_gradient_is_in_flight(comm):
    model = Free()
    optimizer = buffered(comm, model)
    model.take_step(optimizer, 1)
    if comm.rank == 1:
        model.b.array = np.zeros(3, "f")
    for call in (lambda: model.take_step(optimizer, 2), optimizer.flush):
        assert_all_raise(comm, call, ValueError, "rank 1: ValueError: /b was (2,)")
    if comm.rank == 1:
        model.b.array = np.zeros(2, "f")
    optimizer.flush()
    assert_all_ranks(comm, optimizer.t == 1 and same_on_all_ranks(comm, model))


@pytest.mark.parallel([2, 3])
def test_an_error_of_one_ranks_thread_is_raised_on_all(comm, monkeypatch):
    model = Free()
    optimizer = buffered(comm, model)
    engine = comm.background("test").engine
    reduce = engine.allreduce_arrays

    def fail_after(*args, **kwargs):
        reduce(*args, **kwargs)
        raise MemoryError("no room to unpack")

    if comm.rank == 1:
        monkeypatch.setattr(engine, "allreduce_arrays", fail_after)
    model.take_step(optimizer, 1)
    error = None
    try:
        model.take_step(optimizer, 2)
    except Exception as failure:
        error = failure
    ok = "MemoryError: no room to unpack" in str(error) and "rank 1" in str(error)
    assert_all_ranks(comm, ok, f"{error!r}")
    if comm.rank == 1:
        assert isinstance(error.__cause__, MemoryError)
    # One rank has lost the gradient; the others' can be sent to it.
    monkeypatch.undo()
    step = lambda: model.take_step(optimizer, 2)  # noqa: E731
    assert_all_raise(comm, step, MismatchError, "apply gradient 1", "apply none")
    optimizer.bcast_state()
    step()
    optimizer.flush()
    assert_all_ranks(comm, optimizer.t == 2 and same_on_all_ranks(comm, model))
