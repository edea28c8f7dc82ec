import os
import random
import stat

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from helpers.chainer_models import MLP, batches, same_on_all_ranks
from helpers.errors import raised_by
from helpers.ranks import assert_all_ranks
from helpers.trainings import (
    differences,
    log_of,
    make_trainer,
    names_in,
    recorded,
    shared_folder,
    state_of,
)

import chainermn_ng
from chainermn_ng.datasets import SeededOrder


def serial(data):
    return chainer.iterators.SerialIterator(data, 4)


def own_state(data):
    sampler = chainer.iterators.ShuffleOrderSampler(np.random.RandomState(5))
    return chainer.iterators.SerialIterator(data, 4, order_sampler=sampler)


def in_order(data):
    # Chainer's iterators without an order keep None in snapshots.
    return chainer.iterators.MultithreadIterator(data, 4, order_sampler=SeededOrder(2))


def threads(data):
    return chainer.iterators.MultithreadIterator(data, 4, n_threads=2)


def processes(data):
    return chainer.iterators.MultiprocessIterator(
        data, 4, n_processes=1, order_sampler=SeededOrder(4), shared_mem=1000
    )


def checkpointed(
    comm, folder, n_iterations, every=2, name="run", load=False, **options
):
    """Train with snapshots; return the trainer and the batches of this run."""
    trainer = make_trainer(comm, folder, n_iterations, **options)
    checkpointer = chainermn_ng.create_multi_node_checkpointer(name, comm)
    trainer.extend(checkpointer, trigger=(every, "iteration"))
    if load:
        checkpointer.maybe_load(trainer)
    trainer.run()
    return trainer


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.reports(
    "chainer/chainermn#225", "chainer/chainermn#144", "chainer/chainer#3754"
)
@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize(
    "make_iterator", [serial, own_state, in_order, threads], ids=lambda f: f.__name__
)
def test_resumed_run_is_the_unbroken_one_bit_by_bit(
    comm, tmp_path, make_iterator, double_buffering
):
    options = {"make_iterator": make_iterator, "double_buffering": double_buffering}
    folder = shared_folder(comm, tmp_path)
    unbroken = checkpointed(comm, folder / "a", 12, every=4, **options)
    checkpointed(comm, folder / "b", 4, every=4, **options)
    resumed = checkpointed(comm, folder / "b", 12, every=4, load=True, **options)
    a, b = state_of(unbroken), state_of(resumed)
    assert_all_ranks(comm, a == b, differences(a, b))
    assert a["t"] == 12 - double_buffering
    # Saved in epoch 1; those of epochs 1 to 4 are compared.
    seen = [t.updater.get_iterator("main").dataset.batches for t in (unbroken, resumed)]
    ok = len(seen[1]) == 8 and seen[0][4:] == seen[1]
    assert_all_ranks(comm, ok, f"{seen}")


@pytest.mark.parallel(2)
@pytest.mark.filterwarnings("ignore:worker processes are forked")
def test_worker_processes_that_fetch_ahead_keep_the_order(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    options = {"make_iterator": processes, "every": 3}
    a = state_of(checkpointed(comm, folder / "a", 9, **options))
    checkpointed(comm, folder / "b", 3, **options)
    b = state_of(checkpointed(comm, folder / "b", 9, load=True, **options))
    assert_all_ranks(comm, a == b, differences(a, b))


@pytest.mark.parallel(2)
def test_taking_snapshots_changes_nothing(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    with_snapshots = state_of(checkpointed(comm, folder, 6))
    trainer = make_trainer(comm, folder, 6)
    trainer.run()
    without = state_of(trainer)
    assert_all_ranks(
        comm, with_snapshots == without, differences(with_snapshots, without)
    )


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("chainer/chainermn#225")
@pytest.mark.parametrize("attached", ["before", "after"])
def test_shifted_learning_rate_comes_back_in_any_order(comm, tmp_path, attached):
    folder = shared_folder(comm, tmp_path)

    def train(n_iterations, load=False, shift_first=True):
        trainer = make_trainer(comm, folder, n_iterations)
        checkpointer = chainermn_ng.create_multi_node_checkpointer("run", comm)
        shift = extensions.ExponentialShift("lr", 0.1)
        if not shift_first and load:
            checkpointer.maybe_load(trainer)
        trainer.extend(shift, trigger=(2, "iteration"))
        # Also a rate that no extension remembers.
        trainer.extend(halve_momentum, trigger=(3, "iteration"))
        trainer.extend(checkpointer, trigger=(4, "iteration"))
        if shift_first and load:
            checkpointer.maybe_load(trainer)
        _, texts = recorded(trainer.run)
        return trainer, texts

    unbroken, _ = train(8)
    for name in names_in(folder):
        if name.endswith(".8") and name.split(".")[1] == str(comm.rank):
            os.remove(folder / name)
    comm.barrier()
    resumed, texts = train(8, load=True, shift_first=attached == "before")
    rate = resumed.updater.get_optimizer("main").lr
    assert_all_ranks(comm, rate == 0.1 * 0.1**4, f"{rate}")
    a, b = state_of(unbroken), state_of(resumed)
    assert_all_ranks(comm, a == b, differences(a, b))
    told = any("momentum of main: 0.45 instead of 0.9" in text for text in texts)
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")


def halve_momentum(trainer):
    trainer.updater.get_optimizer("main").momentum *= 0.5


@pytest.mark.parallel([1, 2])
@pytest.mark.reports("chainer/chainer#4566", "chainer/chainer#4630")
def test_failed_training_keeps_its_snapshots(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder, 8)
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, remove_on_success=True
    )
    trainer.extend(checkpointer, trigger=(2, "iteration"))

    @chainer.training.make_extension(trigger=(5, "iteration"))
    def fail(trainer):
        raise RuntimeError("broken")

    trainer.extend(fail)
    error = raised_by(lambda: trainer.run(show_loop_exception_msg=False))
    assert_all_ranks(comm, "broken" in str(error), f"{error}")
    expected = [f"run.{rank}.{i}" for rank in range(comm.size) for i in (2, 4)]
    assert_all_ranks(comm, names_in(folder) == expected, f"{names_in(folder)}")
    # It loads; and a run to the end removes the files, as it was asked to.
    trainer = make_trainer(comm, folder, 8)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    assert_all_ranks(comm, checkpointer.maybe_load(trainer) == 4)
    trainer.run()
    comm.barrier()
    assert_all_ranks(comm, names_in(folder) == [], f"{names_in(folder)}")


@pytest.mark.parallel(2)
def test_files_stay_after_success_unless_asked_for(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    checkpointed(comm, folder, 4)
    assert_all_ranks(comm, len(names_in(folder)) == 4, f"{names_in(folder)}")


@pytest.mark.parallel([1, 2])
@pytest.mark.reports("chainer/chainer#4461", "chainer/chainer#4524")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_umask_decides_on_the_mode(comm, tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        folder = shared_folder(comm, tmp_path) / "new"
        checkpointed(comm, folder, 2)
    finally:
        os.umask(before)
    found = stat.S_IMODE((folder / f"run.{comm.rank}.2").stat().st_mode)
    assert_all_ranks(comm, found == mode, oct(found))


@pytest.mark.parallel([1, 2, 3])
def test_old_sets_go_by_number(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    model = chainer.Chain(w=chainer.links.Linear(2, 2))
    keeper = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, cp_interval=2, gc_interval=3, path=str(folder)
    )
    counts = []
    for iteration in range(1, 9):
        keeper.save(model, iteration)
        comm.barrier()
        counts.append(len(names_in(folder)) // comm.size)
        comm.barrier()
    assert_all_ranks(comm, counts == [1, 2, 3, 4, 2, 3, 4, 2], f"{counts}")
    assert_all_ranks(comm, (folder / f"run.{comm.rank}.8").exists())
    # A second job goes on counting.
    keeper = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, cp_interval=1, gc_interval=2, path=str(folder)
    )
    assert_all_ranks(comm, keeper.resume(model) == 8)
    keeper.save(model, 9)
    comm.barrier()
    names = names_in(folder)
    assert_all_ranks(
        comm, names == [f"run.{r}.9" for r in range(comm.size)], f"{names}"
    )
    comm.barrier()
    keeper.remove_all()
    comm.barrier()
    assert_all_ranks(comm, names_in(folder) == [])


@pytest.mark.parallel(2)
@pytest.mark.reports("chainer/chainermn#76", "chainer/chainer#8003")
def test_rank_0_alone_has_a_log(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    def train(n_iterations, log_on, load=False):
        trainer = make_trainer(comm, folder, n_iterations)
        checkpointer = chainermn_ng.create_multi_node_checkpointer("run", comm)
        trainer.extend(checkpointer, trigger=(2, "iteration"))
        if comm.rank in log_on:
            trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
        texts = []
        if load:
            _, texts = recorded(lambda: checkpointer.maybe_load(trainer))
        trainer.run()
        return trainer, texts

    unbroken, _ = train(6, [0])
    for iteration in (4, 6):
        os.remove(folder / f"run.{comm.rank}.{iteration}")
    comm.barrier()
    log = log_of(folder) if comm.rank == 0 else None
    resumed, texts = train(6, [0], load=True)
    a, b = state_of(unbroken), state_of(resumed)
    assert_all_ranks(comm, a == b and texts == [], f"{differences(a, b)} {texts}")
    if comm.rank == 0:
        resumed_log = log_of(folder)
        for entry in (*log, *resumed_log):
            del entry["elapsed_time"]
        assert resumed_log == log
    # An extension without a saved state begins now, and rank 0 says so.
    for iteration in (4, 6):
        os.remove(folder / f"run.{comm.rank}.{iteration}")
    comm.barrier()
    _, texts = train(6, [0, 1], load=True)
    expected = (
        ["state of the extension LogReport (ranks [1])"] if comm.rank == 0 else []
    )
    ok = len(texts) == len(expected) and all(
        e in t for e, t in zip(expected, texts, strict=True)
    )
    assert_all_ranks(comm, ok, f"{texts}")


@pytest.mark.parallel(2)
def test_pythons_generator_and_those_of_the_data_come_back(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    class Noisy:
        def __init__(self):
            self.random = np.random.default_rng(comm.rank)

        def __call__(self, sample):
            x, t = sample
            return x + np.float32(self.random.normal() + random.random()), t

    def make_iterator(data):
        data = chainer.datasets.TransformDataset(data, Noisy())
        return chainer.iterators.SerialIterator(data, 4)

    a = state_of(checkpointed(comm, folder / "a", 6, make_iterator=make_iterator))
    checkpointed(comm, folder / "b", 2, make_iterator=make_iterator)
    b = state_of(
        checkpointed(comm, folder / "b", 6, make_iterator=make_iterator, load=True)
    )
    assert_all_ranks(comm, a == b, differences(a, b))


@pytest.mark.parallel(2)
def test_a_loop_of_ones_own_without_a_trainer(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    noise = np.random.RandomState(comm.rank)

    def make():
        trainer = make_trainer(comm, folder, 99)
        return trainer.updater, chainermn_ng.create_multi_node_checkpointer(
            "loop", comm, path=str(folder), generators=[noise]
        )

    updater, checkpointer = make()
    for _ in range(3):
        updater.update()
    updater.get_optimizer("main").lr = 0.025
    checkpointer.save(updater, updater.iteration)
    expected = noise.randint(1 << 30, size=3).tolist()
    for _ in range(3):
        updater.update()
    a = [p.array.tobytes() for p in updater.get_optimizer("main").target.params()]
    updater, checkpointer = make()
    optimizer = updater.get_optimizer("main")
    iteration, texts = recorded(lambda: checkpointer.maybe_load(updater, optimizer))
    told = len(texts) == 1 and "lr of main: 0.025 instead of 0.1" in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")
    assert_all_ranks(comm, iteration == updater.iteration == 3)
    assert_all_ranks(comm, noise.randint(1 << 30, size=3).tolist() == expected)
    for _ in range(3):
        updater.update()
    b = [p.array.tobytes() for p in updater.get_optimizer("main").target.params()]
    assert_all_ranks(comm, a == b and updater.get_optimizer("main").t == 6)
    assert "1 snapshots" not in checkpointer.get_stats()


@pytest.mark.parallel([1, 2])
def test_nothing_to_load(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder / "no such folder", 2)
    checkpointer = chainermn_ng.create_multi_node_checkpointer("run", comm)
    assert_all_ranks(comm, checkpointer.maybe_load(trainer) is None)
    error = raised_by(lambda: checkpointer.resume(trainer))
    assert_all_ranks(comm, isinstance(error, FileNotFoundError), f"{error!r}")
    assert trainer.updater.iteration == 0


@pytest.mark.parallel(2)
def test_one_job_leaves_another_runs_files_alone_and_warns(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    checkpointed(comm, folder, 4, name="a.1")
    checkpointed(comm, folder, 2, name="a")
    names = names_in(folder)
    expected = ["a.0.2", "a.1.0.2", "a.1.0.4", "a.1.1.2", "a.1.1.4", "a.1.2"]
    assert_all_ranks(comm, names == expected, f"{names}")
    # A second run of the name that does not load is told what a resume would take.
    _, texts = recorded(lambda: checkpointed(comm, folder, 2, name="a.1"))
    told = len(texts) == 1 and "files of iteration 4, of another run" in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")
    # Nothing was overwritten: the older set of that iteration is still there.
    assert_all_ranks(comm, (folder / f"a.1.{comm.rank}.2-1").exists())
    assert_all_ranks(comm, (folder / f"a.1.{comm.rank}.2").exists())


@pytest.mark.parallel(1)
@pytest.mark.parametrize("name", ["", "a/b", 3, None])
def test_bad_names_and_intervals(comm, name):
    with pytest.raises(ValueError, match="name"):
        chainermn_ng.create_multi_node_checkpointer(name, comm)
    with pytest.raises(ValueError, match="cp_interval=0"):
        chainermn_ng.create_multi_node_checkpointer("a", comm, cp_interval=0)
    checkpointer = chainermn_ng.create_multi_node_checkpointer("a", comm)
    with pytest.raises(ValueError, match="path"):
        checkpointer.save(chainer.Chain(), 1)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("kind", ["engine", "mpi_comm"])
def test_other_communicators(comm, tmp_path, kind):
    folder = shared_folder(comm, tmp_path)
    model = chainer.Chain(w=chainer.links.Linear(2, 2))
    keeper = chainermn_ng.create_multi_node_checkpointer(
        "run", getattr(comm, kind), path=str(folder)
    )
    keeper.save(model, 3)
    assert_all_ranks(comm, keeper.maybe_load(model) == 3)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("is_seeded", [False, True])
def test_an_order_that_cannot_be_resumed_is_told_of(comm, tmp_path, is_seeded):
    folder = shared_folder(comm, tmp_path)

    def make_iterator(data):
        sampler = SeededOrder(0) if is_seeded else None
        return chainer.iterators.MultiprocessIterator(
            data, 4, n_processes=1, order_sampler=sampler, shared_mem=1000
        )

    updater = make_trainer(comm, folder, 1, make_iterator=make_iterator).updater
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, path=str(folder)
    )
    texts = recorded(lambda: checkpointer.save(updater, 0))[1]
    texts += recorded(lambda: checkpointer.save(updater, 1))[1]
    updater.finalize()
    told = len(texts) == 1 and "SeededOrder" in texts[0]
    expected = comm.rank == 0 and not is_seeded
    assert_all_ranks(comm, told == expected and len(texts) == expected, f"{texts}")


@pytest.mark.parallel(2)
def test_hyperparameters_of_the_script_where_asked_for(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    for rate, restore, expected in ((0.5, True, 0.5), (0.1, False, 0.1)):
        optimizer = chainermn_ng.create_multi_node_optimizer(
            chainer.optimizers.SGD(rate), comm
        )
        optimizer.setup(chainer.Chain(w=chainer.links.Linear(2, 2)))
        checkpointer = chainermn_ng.create_multi_node_checkpointer(
            "run", comm, path=str(folder), restore_hyperparameters=restore
        )
        if restore:
            checkpointer.save(optimizer, 1)
        else:
            assert checkpointer.maybe_load(optimizer) == 1
        assert_all_ranks(comm, optimizer.lr == expected, f"{optimizer.lr}")


@pytest.mark.parallel(2)
def test_a_model_that_was_not_saved_becomes_the_same_at_the_first_update(
    comm, tmp_path
):
    folder = shared_folder(comm, tmp_path)

    def make():
        optimizer = chainermn_ng.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(0.1), comm
        )
        return optimizer.setup(MLP(seed=comm.rank))

    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, path=str(folder)
    )
    (x, t), *_ = batches(1, 4)
    optimizer = make()
    optimizer.update(optimizer.target, x, t)
    checkpointer.save(optimizer, 1)
    optimizer = make()
    assert_all_ranks(comm, checkpointer.maybe_load(optimizer) == 1)
    optimizer.update(optimizer.target, x, t)
    assert_all_ranks(comm, same_on_all_ranks(comm, optimizer.target))
