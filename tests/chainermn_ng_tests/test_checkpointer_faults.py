import os
import resource
import socket

import chainer
import numpy as np
import pytest
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from helpers.trainings import (
    differences,
    make_trainer,
    names_in,
    recorded,
    shared_folder,
    state_of,
)

import chainermn_ng
from communicators import MismatchError


class Numbers:
    """A target with one array, which says who saved it and when."""

    def __init__(self, rank, iteration=0, n_elems=1000):
        self.value = np.full(n_elems, 1000.0 * rank + iteration)

    def serialize(self, serializer):
        serializer("value", self.value)


def checkpointer_in(comm, folder, **options):
    return chainermn_ng.create_multi_node_checkpointer(
        "run", comm, path=str(folder), **options
    )


def save_numbers(comm, folder, iterations, **options):
    checkpointer = checkpointer_in(comm, folder)
    for iteration in iterations:
        checkpointer.save(Numbers(comm.rank, iteration, **options), iteration)


def load_numbers(comm, folder):
    """Return the iteration, the first number and the warnings."""
    numbers = Numbers(-1)
    iteration, texts = recorded(
        lambda: checkpointer_in(comm, folder).maybe_load(numbers)
    )
    return iteration, numbers.value[0], texts


def cut_off(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def empty(path):
    os.truncate(path, 0)


def remove(path):
    path.unlink()


@pytest.mark.parallel([2, 3])
@pytest.mark.reports(
    "allenai/allennlp#2129", "vllm-project/speculators#739", "chainer/chainermn#144"
)
@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, empty, remove])
def test_damaged_newest_file_of_one_rank_is_skipped_by_all(comm, tmp_path, damage):
    folder = shared_folder(comm, tmp_path)
    save_numbers(comm, folder, [2, 4, 6])
    if comm.rank == 1:
        damage(folder / "run.1.6")
    comm.barrier()
    iteration, value, texts = load_numbers(comm, folder)
    assert_all_ranks(comm, (iteration, value) == (4, 1000 * comm.rank + 4), f"{value}")
    told = len(texts) == 1 and "run.1.6 of rank 1: " in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")
    # The next run comes to 6 again; nothing is overwritten, and that set counts.
    checkpointer = checkpointer_in(comm, folder)
    checkpointer.save(Numbers(comm.rank, 7000), 6)
    iteration, value, texts = load_numbers(comm, folder)
    ok = (iteration, value, texts) == (6, 1000 * comm.rank + 7000, [])
    assert_all_ranks(comm, ok, f"{iteration} {value} {texts}")


@pytest.mark.parallel(2)
def test_where_nothing_loads_training_starts_afresh_and_says_so(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder, 2)
    before = state_of(trainer)
    save_numbers(comm, folder, [2, 4])
    if comm.rank == 1:
        flip_a_bit(folder / "run.0.4")
        cut_off(folder / "run.1.2")
        cut_off(folder / "run.0.2")
    comm.barrier()
    checkpointer = checkpointer_in(comm, folder)
    iteration, texts = recorded(lambda: checkpointer.maybe_load(trainer))
    after = state_of(trainer)
    assert_all_ranks(comm, iteration is None and after == before)
    if comm.rank == 0:
        assert len(texts) == 1, texts
        assert "starts afresh" in texts[0]
        assert all(f"run.{f}" in texts[0] for f in ("0.4", "1.2", "0.2"))


@pytest.mark.parallel(2)
def test_files_of_two_writes_are_no_set(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    save_numbers(comm, folder / "a", [2, 4])
    save_numbers(comm, folder / "b", [2, 4])
    if comm.rank == 0:
        os.replace(folder / "b" / "run.1.4", folder / "a" / "run.1.4")
    comm.barrier()
    iteration, _, texts = load_numbers(comm, folder / "a")
    assert_all_ranks(comm, iteration == 2)
    assert comm.rank != 0 or "were not written together" in texts[0]


@pytest.mark.parallel([2, 3])
def test_folders_that_the_ranks_do_not_share(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    save_numbers(comm, folder / str(comm.rank), [2, 4])
    assert names_in(folder / str(comm.rank)) == [
        f"run.{comm.rank}.2",
        f"run.{comm.rank}.4",
    ]
    for shift in range(comm.size):
        # The ranks come up on other hosts, and get their files from each other.
        here = folder / str((comm.rank + shift) % comm.size)
        iteration, value, texts = load_numbers(comm, here)
        ok = (iteration, value, texts) == (4, 1000 * comm.rank + 4, [])
        assert_all_ranks(comm, ok, f"{shift}: {iteration} {value} {texts}")


def train(comm, folder, n_iterations, load=False, **options):
    trainer = make_trainer(comm, folder, n_iterations, **options)
    checkpointer = chainermn_ng.create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(4, "iteration"))
    log = chainer.training.extensions.LogReport(trigger=(1, "epoch"))
    if comm.rank == 0:
        trainer.extend(log)
    texts = []
    if load:
        _, texts = recorded(lambda: checkpointer.maybe_load(trainer))
    at_start = state_of(trainer)
    trainer.run()
    return trainer, at_start, texts


@pytest.mark.parallel(3)
@pytest.mark.parametrize(("n_before", "n_after"), [(2, 3), (3, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("is_shared", [True, False])
def test_another_number_of_ranks(comm, tmp_path, n_before, n_after, is_shared):
    folder = shared_folder(comm, tmp_path)
    if not is_shared:
        folder /= str(comm.rank)
    # Unequal shards: the place in the epoch is a part of it, not a number of samples.
    members = comm.split(0 if comm.rank < n_before else None, comm.rank)
    if members is not None:
        before, _, _ = train(members, folder, 8, n_samples=12)
        saved = state_of(before)
        members.finalize()
    else:
        saved = None
    saved = comm.bcast_obj(saved)
    members = comm.split(0 if comm.rank < n_after else None, comm.rank)
    ok, message = True, ""
    if members is not None:
        after, loaded, texts = train(members, folder, 12, load=True, n_samples=6)
        same = [k for k in saved if k[0] == "/" or k in ("t", "rate", "iteration")]
        message = differences({k: saved[k] for k in same}, {k: loaded[k] for k in same})
        ok = len(same) >= 15 and not message
        # 8 batches of 4 from 12 samples end at 2 2/3 epochs; 4 of 6 samples.
        ok = ok and 2.66 < loaded["position"] < 2.67
        ok = ok and after.updater.iteration == 12
        if comm.rank == 0:
            message += f"{texts}"
            # On hosts that are gone are files, too; one is enough for equal models.
            is_whole = is_shared or n_after >= n_before
            ok = ok and len(texts) == 2 - is_whole
            ok = ok and (is_whole or "no set is whole: run." in texts[0])
            ok = ok and f"saved by {n_before} ranks, loaded on {n_after}" in texts[-1]
            ok = ok and "the order of the samples (ranks [0" in texts[-1]
        members.finalize()
    assert_all_ranks(comm, ok, message)


@pytest.mark.parallel(3)
def test_different_models_are_not_for_another_number_of_ranks(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    save_numbers(comm, folder, [2])
    members = comm.split(int(comm.rank < 2), comm.rank)
    iteration, value, texts = load_numbers(members, folder)
    assert_all_ranks(comm, iteration is None and value == -1000)
    if comm.rank == 0:
        assert (
            "3 ranks had different models, which 2 ranks cannot take over" in texts[0]
        )
    members.finalize()


@pytest.mark.parallel(3)
def test_a_host_is_lost_with_its_disk(comm, tmp_path):
    # Nothing is whole any more; the newest of what is left of equal models will do.
    folder = shared_folder(comm, tmp_path) / str(comm.rank)
    train(comm, folder, 8)
    if comm.rank == 1:
        for name in names_in(folder):
            (folder / name).unlink()
    comm.barrier()
    after, loaded, texts = train(comm, folder, 12, load=True)
    assert_all_ranks(comm, (loaded["iteration"], loaded["t"]) == (8, 8), f"{loaded}")
    assert_all_ranks(comm, after.updater.iteration == 12)
    if comm.rank == 0:
        assert any("run.1.8 of rank 1: missing" in text for text in texts), texts
        assert any("order of the samples (ranks [1])" in text for text in texts), texts


@pytest.mark.parallel(2)
def test_another_model_is_an_error_on_all_ranks(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    checkpointer = checkpointer_in(comm, folder)
    checkpointer.save(chainer.Chain(a=chainer.links.Linear(2, 2)), 1)
    name = "a" if comm.rank == 0 else "b"
    other = chainer.Chain(**{name: chainer.links.Linear(2, 2)})
    assert_all_raise(
        comm,
        lambda: checkpointer.maybe_load(other),
        Exception,
        "loading 1 failed on rank 1: KeyError",
        "b/",
    )


@pytest.mark.parallel(2)
def test_ranks_at_different_iterations_are_an_error_on_all(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    checkpointer = checkpointer_in(comm, folder)
    assert_all_raise(
        comm,
        lambda: checkpointer.save(Numbers(0), 2 + comm.rank),
        MismatchError,
        "iteration 3 on rank 1",
    )
    assert_all_ranks(comm, names_in(folder) == [], f"{names_in(folder)}")


@pytest.mark.parallel([2, 3])
def test_a_rank_that_cannot_write_is_an_error_on_all(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    save_numbers(comm, folder, [2, 4])
    checkpointer = checkpointer_in(comm, folder)

    def save():
        # In the middle of the file of rank 1 the kernel refuses to go on.
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            checkpointer.save(Numbers(comm.rank, 6), 6)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert_all_raise(comm, save, OSError, "failed on rank 1: ", "File too large")
    expected = [f"run.{rank}.{i}" for rank in range(comm.size) for i in (2, 4)]
    assert_all_ranks(comm, names_in(folder) == expected, f"{names_in(folder)}")
    assert_all_ranks(comm, load_numbers(comm, folder)[0] == 4)
    checkpointer.save(Numbers(comm.rank, 6), 6)
    assert_all_ranks(comm, load_numbers(comm, folder)[0] == 6)


@pytest.mark.parallel(2)
def test_a_file_in_the_place_of_the_folder(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    path = folder / "file"
    if comm.rank == 0:
        path.write_text("")
    comm.barrier()
    path = path if comm.rank == 1 else folder / "good"
    checkpointer = checkpointer_in(comm, path)
    for call in (
        lambda: checkpointer.save(Numbers(0), 2),
        lambda: checkpointer.maybe_load(Numbers(0)),
    ):
        assert_all_raise(comm, call, OSError, "failed on rank 1: ")


@pytest.mark.parallel(2)
def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    host = socket.gethostname()
    dead = 2**22 + 1  # above the highest number that Linux gives
    leftovers = {
        f"tmp-run.{comm.rank}.2.{host}.{dead}": False,
        f"tmp-run.{comm.rank}.2-1.other.host.7": False,
        f"tmp-run.{comm.rank}.4.{host}.{os.getppid()}": True,
        f"tmp-run.x.{comm.rank}.4.{host}.{dead}": True,
        "tmp-run.9.2.elsewhere.1": False,
        "notes.txt": True,
    }
    for name in leftovers:
        (folder / name).write_text("cut off")
    comm.barrier()
    save_numbers(comm, folder, [6])
    stay = {name: (folder / name).exists() for name in leftovers}
    assert_all_ranks(comm, stay == leftovers, f"{stay}")
