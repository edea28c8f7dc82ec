import io
import os
import random
import struct
import zipfile

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from helpers.trainings import make_trainer, recorded, shared_folder

import chainermn_ng
from chainermn_ng.extensions import generator_states, snapshot_files


def checkpointer_in(comm, folder):
    return chainermn_ng.create_multi_node_checkpointer("run", comm, path=str(folder))


def linear(n_in, n_out):
    return chainer.links.Linear(n_in, n_out)


# -- damaged files -------------------------------------------------------------------


def ask_for_a_later_version(content):
    content[content.rindex(b"PK\x01\x02") + 6] = 226


def say_encrypted(content):
    content[content.rindex(b"PK\x01\x02") + 8] |= 1


def break_the_compression(content):
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        offset = archive.infolist()[0].header_offset
    sizes = struct.unpack("<HH", content[offset + 26 : offset + 30])
    begin = offset + 30 + sum(sizes)
    content[begin : begin + 20] = b"\xff" * 20


def no_archive(content):
    content[:] = b"hello world, this is not a snapshot"


DAMAGES = [ask_for_a_later_version, say_encrypted, break_the_compression, no_archive]


def replica_run(comm, folder, n_iterations):
    trainer = make_trainer(comm, folder, n_iterations, n_samples=12)
    snapshot = chainermn_ng.extensions.multi_node_snapshot(
        comm, extensions.snapshot(autoload=True), [0]
    )
    trainer.extend(snapshot, trigger=(2, "iteration"))
    began = []
    trainer.extend(lambda t: began.append(t.updater.iteration - 1), name="note")
    _, texts = recorded(trainer.run)
    comm.barrier()
    return began[0], texts


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_of_any_kind_is_skipped_and_named(comm, tmp_path, damage):
    folder = shared_folder(comm, tmp_path)
    replica_run(comm, folder, 4)
    last = comm.size - 1
    path = folder / f"snapshot_iter_4.{last}"
    if comm.rank == last:
        content = bytearray(path.read_bytes())
        damage(content)
        path.write_bytes(bytes(content))
    comm.barrier()
    began, texts = replica_run(comm, folder, 6)
    assert_all_ranks(comm, began == 2, f"{began}")
    told = len(texts) == 1 and f"{path.name} of rank {last}: damaged" in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")


@pytest.mark.parallel(2)
def test_another_error_in_the_search_is_one_on_all_ranks(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)
    trainer = make_trainer(comm, folder, 2)
    snapshot = chainermn_ng.extensions.multi_node_snapshot(
        comm, extensions.snapshot(autoload=True), [0]
    )
    if comm.rank == 1:
        # No pattern of names.
        snapshot.snapshot.filename = 3
    assert_all_raise(
        comm, lambda: snapshot.initialize(trainer), TypeError, "failed on rank 1"
    )


# -- names that lie ------------------------------------------------------------------


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("by", ["rename", "symlink"])
def test_a_file_under_another_iterations_name_is_skipped_and_named(comm, tmp_path, by):
    folder = shared_folder(comm, tmp_path)
    checkpointer = checkpointer_in(comm, folder)
    model = linear(2, 2)
    for iteration in (2, 4):
        checkpointer.save(model, iteration)
    old, new = (folder / f"run.{comm.rank}.{i}" for i in (2, 9))
    if by == "rename":
        os.replace(old, new)
    else:
        new.symlink_to(old)
    comm.barrier()
    got, texts = recorded(lambda: checkpointer_in(comm, folder).maybe_load(model))
    assert_all_ranks(comm, got == 4, f"{got}")
    told = len(texts) == 1 and "run.0.9 of rank 0: renamed: it was written" in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")


@pytest.mark.parallel([1, 2])
def test_a_negative_iteration_is_an_error_on_all_ranks(comm, tmp_path):
    checkpointer = checkpointer_in(comm, shared_folder(comm, tmp_path))
    assert_all_raise(
        comm, lambda: checkpointer.save(linear(2, 2), -1), ValueError, "iteration=-1"
    )


# -- other models --------------------------------------------------------------------


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(("saved", "here"), [((2, 3), (4, 3)), ((1, 3), (4, 3))])
def test_another_shape_is_an_error_that_names_entry_and_file(
    comm, tmp_path, saved, here
):
    # NumPy would spread an array of one column over four.
    checkpointer = checkpointer_in(comm, shared_folder(comm, tmp_path))
    checkpointer.save(linear(*saved), 1)
    assert_all_raise(
        comm,
        lambda: checkpointer.maybe_load(linear(*here)),
        ValueError,
        f"entry W of run.0.1: its shape is {saved[::-1]}, here it is {here[::-1]}. Is "
        "the file of another model",
    )


@pytest.mark.parallel([1, 2])
def test_a_missing_entry_names_the_file(comm, tmp_path):
    checkpointer = checkpointer_in(comm, shared_folder(comm, tmp_path))
    checkpointer.save(chainer.Chain(a=linear(2, 2)), 1)
    assert_all_raise(
        comm,
        lambda: checkpointer.maybe_load(chainer.Chain(b=linear(2, 2))),
        Exception,
        "run.0.1 has no entry b/",
    )


def updater_of(comm, model, optimizer, iterator=None):
    optimizer = chainermn_ng.create_multi_node_optimizer(optimizer, comm).setup(model)
    if iterator is None:
        iterator = chainer.iterators.SerialIterator([np.ones(2, "f")] * 4, 1)
    return training.updaters.StandardUpdater(
        iterator,
        optimizer,
        loss_func=lambda x: sum(
            chainer.functions.sum(link(x)) for link in model.children()
        ),
    )


@pytest.mark.parallel([1, 2])
def test_a_larger_model_is_an_error_on_all_ranks(comm, tmp_path):
    checkpointer = checkpointer_in(comm, shared_folder(comm, tmp_path))
    large = chainer.Chain(a=linear(2, 2), b=linear(2, 2))
    updater = updater_of(comm, large, chainer.optimizers.Adam())
    updater.update()
    checkpointer.save(updater, 1)
    small = updater_of(comm, chainer.Chain(a=linear(2, 2)), chainer.optimizers.Adam())
    assert_all_raise(
        comm,
        lambda: checkpointer.maybe_load(small),
        ValueError,
        "run.0.1 holds parameters that the model has not: model:main/b/W, "
        "model:main/b/b",
    )


@pytest.mark.parallel([1, 2])
def test_state_that_another_optimizer_leaves_out_is_told_of(comm, tmp_path):
    checkpointer = checkpointer_in(comm, shared_folder(comm, tmp_path))
    momentum = chainer.optimizers.MomentumSGD()
    updater = updater_of(comm, chainer.Chain(a=linear(2, 2)), momentum)
    updater.update()
    checkpointer.save(updater, 1)
    other = updater_of(comm, chainer.Chain(a=linear(2, 2)), chainer.optimizers.SGD())
    _, texts = recorded(lambda: checkpointer.maybe_load(other))
    told = any("has not: optimizer:main/a/W/v, opt" in text for text in texts)
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")


# -- what describes a snapshot -------------------------------------------------------


class NarrowIterator(chainer.iterators.SerialIterator):
    @property
    def epoch_detail(self):
        return np.float32(super().epoch_detail)


@pytest.mark.parallel([1, 2])
def test_numpy_scalars_describe_a_snapshot(comm, tmp_path):
    checkpointer = checkpointer_in(comm, shared_folder(comm, tmp_path))
    model = chainer.Chain(a=linear(2, 2))
    iterator = NarrowIterator([np.ones(2, "f")] * 4, 1)
    updater = updater_of(comm, model, chainer.optimizers.SGD(), iterator)
    updater.update()
    checkpointer.save(updater, 1)
    assert_all_ranks(comm, checkpointer.maybe_load(updater) == 1)


def test_a_description_turns_numbers_of_any_kind_into_json():
    meta = {"a": np.float32(0.5), "b": np.arange(2), "c": [np.int64(3), np.bool_(True)]}
    encoded = {snapshot_files.META_KEY: snapshot_files.encoded_meta(meta)}
    expected = {"a": 0.5, "b": [0, 1], "c": [3, True]}
    assert snapshot_files.read_meta(encoded) == expected


def test_a_generator_without_a_state_is_left_out():
    roots = {"data": [random.SystemRandom(), random.Random(1)]}
    states = generator_states.capture(roots)
    expected = roots["data"][1].random()
    assert list(states["own"]) == ["data[1]"]
    assert generator_states.restore(states, roots) == []
    assert roots["data"][1].random() == expected


# -- another number of ranks ---------------------------------------------------------


@pytest.mark.parallel([2, 3])
def test_shard_iterators_go_on_on_fewer_ranks(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    def updater_on(members):
        data = [np.ones(2, "f")] * (24 // members.size)
        iterator = chainermn_ng.iterators.ShardIterator(data, 2, members)
        model = chainer.Chain(a=linear(2, 2))
        return updater_of(members, model, chainer.optimizers.SGD(), iterator)

    updater = updater_on(comm)
    for _ in range(updater.get_iterator("main").n_iterations * 3 // 2):
        updater.update()
    checkpointer_in(comm, folder).save(updater, 1)
    members = comm.split(0 if comm.rank < comm.size - 1 else None, comm.rank)
    ok, message = True, ""
    if members is not None:
        again = updater_on(members)
        load = checkpointer_in(members, folder).maybe_load
        _, texts = recorded(lambda: load(again))
        detail = again.get_iterator("main").epoch_detail
        ok = detail == 1.5 and not any("anew" in text for text in texts)
        message = f"{detail} {texts}"
        members.finalize()
    assert_all_ranks(comm, ok, message)


class WithoutPlace(chainer.iterators.SerialIterator):
    def serialize(self, serializer):
        self.order = serializer("order", np.arange(4))


@pytest.mark.parallel(2)
def test_an_iterator_that_begins_its_epoch_anew_is_told_of(comm, tmp_path):
    folder = shared_folder(comm, tmp_path)

    def updater_on(members):
        iterator = WithoutPlace([np.ones(2, "f")] * 4, 1)
        model = chainer.Chain(a=linear(2, 2))
        return updater_of(members, model, chainer.optimizers.SGD(), iterator)

    updater = updater_on(comm)
    updater.update()
    checkpointer_in(comm, folder).save(updater, 1)
    members = comm.split(comm.rank, 0)
    if comm.rank == 1:
        members.finalize()
        return
    load = checkpointer_in(members, folder).maybe_load
    _, texts = recorded(lambda: load(updater_on(members)))
    members.finalize()
    assert any("iterator main, which begins it anew" in text for text in texts), texts
