import os
import resource
import stat

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from chainer.training.extensions import snapshot_writers
from helpers.chainer_models import weights
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from helpers.trainings import make_trainer, names_in, recorded, shared_folder

from chainermn_ng.extensions import multi_node_snapshot
from chainermn_ng.extensions.replica_snapshots import parse_replica_sets


def train(comm, folder, n_iterations, sets, log_on=(), every=2, **options):
    """Train; return the iteration it began at, the trainer, and the warnings."""
    trainer = make_trainer(comm, folder, n_iterations, n_samples=12)
    options = {"autoload": True, **options}
    snapshot = multi_node_snapshot(comm, extensions.snapshot(**options), sets)
    trainer.extend(snapshot, trigger=(every, "iteration"))
    began = []
    trainer.extend(lambda t: began.append(t.updater.iteration - 1), name="note")
    if comm.rank in log_on:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    _, texts = recorded(trainer.run)
    comm.barrier()
    return (began[0] if began else None), trainer, texts


@pytest.mark.parallel([2, 3])
@pytest.mark.reports("allenai/allennlp#2129", "vllm-project/speculators#739")
def test_damaged_newest_file_of_one_set_is_skipped_by_all(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    train(comm, folder, 6, [0])
    path = folder / "snapshot_iter_6.1"
    if comm.rank == 1:
        os.truncate(path, path.stat().st_size - 100)
    comm.barrier()
    began, trainer, texts = train(comm, folder, 8, [0])
    ok = began == 4 and trainer.updater.get_optimizer("main").t == 8
    assert_all_ranks(comm, ok, f"{began}")
    told = len(texts) == 1 and "snapshot_iter_6.1 of rank 1: damaged" in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")


@pytest.mark.parallel(3)
@pytest.mark.reports("chainer/chainer#7947")
def test_sets_out_of_step_resume_at_the_newest_that_all_hold(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    train(comm, folder, 6, [0, 1])
    if comm.rank == 2:
        (folder / "snapshot_iter_6.2").unlink()
    comm.barrier()
    began, _, texts = train(comm, folder, 6, [0, 1])
    assert_all_ranks(comm, began == 4, f"{began}")
    if comm.rank == 0:
        assert len(texts) == 1, texts
        assert "resumes at 4; skipped: iteration 6: no file of rank 2" in texts[0]


@pytest.mark.parallel(3)
@pytest.mark.reports("chainer/chainer#7947")
def test_three_ranks_one_rank_three_ranks(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    train(comm, folder, 4, [0])
    alone = comm.split(0 if comm.rank == 0 else None, 0)
    if alone is not None:
        assert train(alone, folder, 8, [0])[0] == 4
        alone.finalize()
    comm.barrier()
    # Only rank 0's set knows of 6 and 8.
    assert "snapshot_iter_8.0" in names_in(folder)
    began, trainer, _ = train(comm, folder, 10, [0])
    assert_all_ranks(comm, began == 4 and trainer.updater.iteration == 10, f"{began}")
    began, _, texts = train(comm, folder, 11, [0])
    assert_all_ranks(comm, began == 10 and texts == [], f"{began} {texts}")


@pytest.mark.parallel(2)
@pytest.mark.reports("chainer/chainermn#76", "chainer/chainer#8003")
@pytest.mark.parametrize("sets", [[0], []], ids=str)
@pytest.mark.parametrize("log_on", [0, 1])
def test_one_rank_alone_has_a_log(comm, tmp_path, sets, log_on):
    folder = shared_folder(comm, tmp_path)
    _, first, _ = train(comm, folder, 4, sets, log_on=[log_on])
    began, _, texts = train(comm, folder, 6, sets, log_on=[log_on])
    assert_all_ranks(comm, began == 4, f"{began}")
    # In one set rank 0 saves for both, and has no log of rank 1's.
    lost = sets == [] and log_on == 1 and comm.rank == 0
    told = [
        "extension LogReport is not in the snapshot that rank 1" in t for t in texts
    ]
    assert_all_ranks(comm, told == [True] * lost, f"{texts}")
    model = first.updater.get_optimizer("main").target
    loaded = make_trainer(comm, folder, 4, n_samples=12)
    name = f"snapshot_iter_4.{0 if sets == [] else comm.rank}"
    # The files are Chainer's.
    chainer.serializers.load_npz(folder / name, loaded, strict=False)
    a = weights(model)
    b = weights(loaded.updater.get_optimizer("main").target)
    assert_all_ranks(comm, all((a[k] == b[k]).all() for k in a))


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    "make_writer",
    [
        snapshot_writers.SimpleWriter,
        snapshot_writers.ThreadWriter,
        snapshot_writers.ThreadQueueWriter,
    ],
)
def test_writers_old_files_and_modes(comm, tmp_path, make_writer):
    folder = shared_folder(comm, tmp_path)
    before = os.umask(0o022)
    try:
        train(comm, folder, 7, [0], every=1, writer=make_writer(), n_retains=2)
        began, _, texts = train(comm, folder, 9, [0], every=1, writer=make_writer())
    finally:
        os.umask(before)
    assert_all_ranks(comm, (began, texts) == (7, []), f"{began} {texts}")
    numbers = {int(name.split("_")[2].split(".")[0]) for name in names_in(folder)}
    # A writer in the background may be behind by one or, with a queue, more.
    assert_all_ranks(comm, {6, 7, 8, 9} <= numbers, f"{numbers}")
    if make_writer is snapshot_writers.SimpleWriter:
        assert_all_ranks(comm, numbers == {6, 7, 8, 9}, f"{numbers}")
    mode = stat.S_IMODE((folder / f"snapshot_iter_7.{comm.rank}").stat().st_mode)
    assert_all_ranks(comm, mode == 0o644, oct(mode))


@pytest.mark.parallel(2)
def test_nothing_is_removed_that_another_set_still_needs(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    train(comm, folder, 4, [0], n_retains=1)
    assert_all_ranks(comm, len(names_in(folder)) == 2, f"{names_in(folder)}")
    trainer = make_trainer(comm, folder, 6, n_samples=12)
    chainer_snapshot = extensions.snapshot(autoload=True, n_retains=1)
    snapshot = multi_node_snapshot(comm, chainer_snapshot, [0])
    trainer.extend(snapshot, trigger=(2, "iteration"))
    if comm.rank == 1:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        assert_all_raise(
            comm,
            lambda: trainer.run(show_loop_exception_msg=False),
            OSError,
            "writing failed on rank 1",
            "File too large",
        )
    finally:
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    expected = ["snapshot_iter_4.0", "snapshot_iter_4.1", "snapshot_iter_6.0"]
    assert_all_ranks(comm, names_in(folder) == expected, f"{names_in(folder)}")
    assert_all_ranks(comm, train(comm, folder, 6, [0])[0] == 4)


@pytest.mark.parallel(2)
def test_files_that_chainer_wrote_itself_and_damage_in_them(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder, 4, n_samples=12)
    trainer.extend(
        extensions.snapshot(
            filename=f"snapshot_iter_{{.updater.iteration}}.{comm.rank}"
        ),
        trigger=(2, "iteration"),
    )
    trainer.run()
    comm.barrier()
    began, _, texts = train(comm, folder, 5, [0])
    assert_all_ranks(comm, (began, texts) == (4, []), f"{began} {texts}")
    if comm.rank == 0:
        path = folder / "snapshot_iter_4.0"
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    comm.barrier()
    assert_all_ranks(comm, train(comm, folder, 5, [0])[0] == 2)


@pytest.mark.parallel(2)
def test_a_model_alone_and_a_name_made_by_a_function(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder, 3, n_samples=12)
    model = trainer.updater.get_optimizer("main").target
    for filename in ("model_{.updater.iteration}", lambda t: f"f{t.updater.iteration}"):
        snapshot = extensions.snapshot_object(model, filename)
        trainer.extend(
            multi_node_snapshot(comm, snapshot, []), trigger=(3, "iteration")
        )
    trainer.run()
    comm.barrier()
    assert_all_ranks(comm, names_in(folder) == ["f3.0", "model_3.0"])
    other = make_trainer(comm, folder, 1, n_samples=12)
    loaded = other.updater.get_optimizer("main").target
    loaded.l1.W.array[:] = np.nan
    snapshot = extensions.snapshot_object(
        loaded, "model_{.updater.iteration}", autoload=True
    )
    multi_node_snapshot(comm, snapshot, []).initialize(other)
    assert_all_ranks(comm, bool((loaded.l1.W.array == model.l1.W.array).all()))
    assert other.updater.iteration == 0


@pytest.mark.parallel(1)
@pytest.mark.parametrize(
    ("sets", "size", "expected"),
    [
        ([0], 4, [[0], [1, 2, 3]]),
        ([0, 1], 4, [[0], [1], [2, 3]]),
        ([[0, 1], [2, 3]], 4, [[0, 1], [2, 3]]),
        ([], 4, [[0, 1, 2, 3]]),
        ([range(0, 8, 2)], 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ([np.int64(1), (i for i in (2, 0))], 3, [[1], [0, 2]]),
    ],
)
def test_replica_sets(sets, size, expected):
    assert parse_replica_sets(sets, size) == expected


@pytest.mark.parallel(1)
def test_mistakes(comm):
    for sets, text in (([4], "rank 4 does not"), ([0, [0]], "twice"), ([[]], "empty")):
        with pytest.raises(ValueError, match=text):
            parse_replica_sets(sets, 4)
    with pytest.raises(TypeError, match=r"extensions\.snapshot"):
        multi_node_snapshot(comm, extensions.LogReport(), [])
    snapshot = multi_node_snapshot(comm, extensions.snapshot(), [0])
    assert (snapshot.trigger, snapshot.priority) == ((1, "epoch"), -100)
    assert (snapshot.is_master, snapshot.master, snapshot.replica_set) == (True, 0, {0})


@pytest.mark.parallel(2)
@pytest.mark.reports("chainer/chainermn#225")
@pytest.mark.parametrize("kind", ["exponential", "step", "by hand"])
def test_learning_rate_comes_back(comm, tmp_path, kind):
    folder = shared_folder(comm, tmp_path)

    def train_shifting(n_iterations):
        trainer = make_trainer(comm, folder, n_iterations, n_samples=12)
        snapshot = extensions.snapshot(autoload=True)
        trainer.extend(
            multi_node_snapshot(comm, snapshot, [0]), trigger=(4, "iteration")
        )
        if kind == "exponential":
            trainer.extend(
                extensions.ExponentialShift("lr", 0.5), trigger=(2, "iteration")
            )
        elif kind == "step":
            trainer.extend(extensions.StepShift("lr", 0.5, 2), trigger=(1, "iteration"))
        else:
            trainer.extend(halve_rate, trigger=(2, "iteration"))
        rates = []
        trainer.extend(
            lambda t: rates.append(t.updater.get_optimizer("main").lr), name="note"
        )
        return rates, recorded(trainer.run)[1]

    train_shifting(4)
    rates, texts = train_shifting(6)
    ok = rates == [0.1 * 0.5**2, 0.1 * 0.5**3]
    assert_all_ranks(comm, ok, f"{rates}")
    # The script says another rate, and no extension knows better.
    told = len(texts) == 1 and "lr of main: 0.025 instead of 0.1" in texts[0]
    assert_all_ranks(comm, told == (kind == "by hand" and comm.rank == 0), f"{texts}")


def halve_rate(trainer):
    trainer.updater.get_optimizer("main").lr *= 0.5
