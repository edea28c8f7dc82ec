"""Chainer's snapshot extension for several ranks."""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any

from chainer import training
from chainer.training import extension
from chainer.training.extensions import _snapshot as chainer_snapshot
from chainer.training.extensions import snapshot_writers

from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.extensions import snapshot_content, snapshot_files
from chainermn_ng.extensions.replica_files import (
    description,
    held_files,
    open_any,
    remove_leftovers,
    save,
)
from chainermn_ng.extensions.replica_sets import parse_replica_sets
from chainermn_ng.extensions.snapshot_sets import agree

_LABEL = "multi_node_snapshot"


def multi_node_snapshot(
    comm: Any,
    snapshot: Any,
    replica_sets: Iterable[int | Iterable[int]],
    *,
    restore_hyperparameters: bool = True,
) -> MultiNodeSnapshot:
    """Let one rank of each replica set take snapshots for all of that set.

    ::

        snapshot = chainer.training.extensions.snapshot(autoload=True, n_retains=3)
        trainer.extend(multi_node_snapshot(comm, snapshot, [0]), trigger=(1, "epoch"))

    A replica set are ranks whose trainers have the same extensions and the same state.
    Here rank 0 is one of its own, since it alone prints and writes reports, and the
    others, which are named nowhere, make up the second. The lowest rank of each saves,
    in files with its number at the end of the name; the number of ranks may change.

    Where every rank has a state of its own, such as the order of its samples and its
    random generators, and training shall go on exactly as it was, take
    :func:`~chainermn_ng.create_multi_node_checkpointer`.

    Not collective. Attach it on all ranks, with the same trigger.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py.
        snapshot: made by ``chainer.training.extensions.snapshot`` or
            ``snapshot_object``; its ``filename``, ``writer`` and hooks are changed.
            With ``autoload`` all ranks load the newest iteration that all replica sets
            hold undamaged. ``n_retains`` counts such iterations.
        replica_sets: each a rank or several ranks.
        restore_hyperparameters: with ``autoload``, give the optimizers the learning
            rate and other hyperparameters that they had, not those in the script; with
            a warning where they differ.

    Returns:
        MultiNodeSnapshot: the extension; trigger and priority are those of
        ``snapshot``.

    Raises:
        TypeError: not such a snapshot.
        ValueError: ranks that do not exist, or are in two sets.
    """
    return MultiNodeSnapshot(
        comm, snapshot, replica_sets, restore_hyperparameters=restore_hyperparameters
    )


class MultiNodeSnapshot(extension.Extension):
    """Made by :func:`multi_node_snapshot`.

    Attributes:
        comm: the communicator.
        snapshot: Chainer's extension, which saves on the master.
        replica_set (set): the ranks of this one's replica set.
        master (int): the lowest of them, which saves.
    """

    is_collective = True

    def __init__(
        self,
        comm: Any,
        snapshot: Any,
        replica_sets: Iterable[int | Iterable[int]],
        *,
        restore_hyperparameters: bool = True,
    ) -> None:
        if not isinstance(snapshot, chainer_snapshot._Snapshot):
            raise TypeError(
                f"multi_node_snapshot: got {type(snapshot).__qualname__}; expected "
                "what chainer.training.extensions.snapshot() returns"
            )
        self.comm = comm
        self.snapshot = snapshot
        self.trigger, self.priority = snapshot.trigger, snapshot.priority
        self._restore_hyperparameters = restore_hyperparameters
        rank, size = _rank_and_size(comm)
        self._rank = rank
        self._masters = []
        for members in parse_replica_sets(replica_sets, size):
            self._masters.append(members[0])
            if rank in members:
                self.master, self.replica_set = members[0], set(members)
        snapshot.filename = _with_rank(snapshot.filename, rank)
        # Iteration of each of this rank's files, by name.
        self._files: dict[str, int] = {}
        self._run = ""
        self._describe_and_seal()

    @property
    def is_master(self) -> bool:
        """Whether this rank saves for its replica set."""
        return self._rank == self.master

    # -- saving ----------------------------------------------------------------------

    def __call__(self, trainer: training.Trainer) -> None:
        """Save on the masters. Collective; called by the trainer.

        Raises:
            OSError: a master cannot write; on all ranks. Older files are untouched.
        """
        error: BaseException | None = None
        if self.is_master:
            try:
                self.snapshot(trainer)
            except Exception as failure:
                error = failure
        with engine_of(self.comm) as engine:
            agree(engine, f"{_LABEL}, writing", error)
            self._remove_old(engine, pathlib.Path(trainer.out))

    def on_error(self, trainer: training.Trainer, exc: Exception, tb: Any) -> None:
        """Save if the snapshot is set to after an error; called by the trainer."""
        if self.is_master:
            self.snapshot.on_error(trainer, exc, tb)

    def finalize(self) -> None:
        """Wait for a writer in the background; called by the trainer."""
        if self.is_master:
            self.snapshot.finalize()

    def _describe_and_seal(self) -> None:
        """Let the snapshot's writer write files that can be checked."""
        save_as_it_is = self.snapshot._make_snapshot
        writer = self.snapshot.writer
        meta: dict[str, Any] = {}
        beside: dict[str, Any] = {}

        def make_snapshot(trainer: training.Trainer) -> None:
            target = self._target(trainer)
            meta.update(
                snapshot_content.describe(target),
                iteration=trainer.updater.iteration,
                rank=self._rank,
                run=self._run,
            )
            beside.clear()
            beside.update(snapshot_content.collect_master_weights(target))
            save_as_it_is(trainer)

        def write(filename: str, outdir: str, target: Any) -> None:
            target[snapshot_files.META_KEY] = snapshot_files.encoded_meta(meta)
            target.update(beside)
            self._files[filename] = meta["iteration"]
            writer(filename, outdir, target)

        # Writers in a thread or a process call it there.
        if isinstance(writer, snapshot_writers.QueueWriter):
            writer._task.save = save
        elif isinstance(writer, snapshot_writers.Writer):
            writer.save = save
        self.snapshot._make_snapshot = make_snapshot
        self.snapshot.writer = _Delegate(writer, write)

    def _remove_old(self, engine: Any, folder: pathlib.Path) -> None:
        """Remove files beyond ``n_retains`` iterations that all masters hold."""
        n_retains = self.snapshot.n_retains
        if n_retains <= 0:
            return
        # A writer in the background may not be ready with the newest.
        mine = [i for name, i in self._files.items() if (folder / name).exists()]
        told = engine.allgather_obj(set(mine) if self.is_master else None)
        common = set.intersection(*(held for held in told if held is not None))
        if len(common) < n_retains or not self.is_master:
            return
        oldest = sorted(common)[-n_retains]
        for name, iteration in list(self._files.items()):
            if iteration < oldest:
                snapshot_files.discard(folder / name)
                del self._files[name]

    # -- loading ---------------------------------------------------------------------

    def initialize(self, trainer: training.Trainer) -> None:
        """Load what all replica sets hold, with ``autoload``. Collective.

        Called by the trainer when its run begins.

        Raises:
            KeyError, ValueError, TypeError: a file does not fit this program; on all
                ranks.
        """
        folder = pathlib.Path(trainer.out)
        with engine_of(self.comm) as engine:
            self._run = engine.bcast_obj(os.urandom(8).hex())
            error = None
            try:
                if self.is_master:
                    remove_leftovers(folder, self.snapshot.filename)
                    self._files = held_files(folder, self.snapshot.filename)
            except Exception as failure:
                error = failure
            agree(engine, f"{_LABEL}, looking for files", error)
            if self.snapshot.autoload:
                self._autoload(engine, trainer, folder)

    def _autoload(
        self, engine: Any, trainer: training.Trainer, folder: pathlib.Path
    ) -> None:
        by_iteration = {i: name for name, i in sorted(self._files.items())}
        views = engine.allgather_obj(by_iteration if self.is_master else {})
        faults: list[str] = []
        for iteration in sorted({i for view in views for i in view}, reverse=True):
            lacking = [m for m in self._masters if iteration not in views[m]]
            if lacking:
                ranks = ", ".join(map(str, lacking))
                faults.append(f"iteration {iteration}: no file of rank {ranks}")
                continue
            found = self._check(engine, folder, by_iteration.get(iteration))
            if not found:
                break
            faults += [f"iteration {iteration}: {fault}" for fault in found]
        else:
            iteration = None
        if faults and engine.rank == 0:
            end = "training starts afresh" if iteration is None else "resumes at "
            warnings.warn(
                f"{_LABEL}: {end}{'' if iteration is None else iteration}; skipped: "
                + "; ".join(faults),
                stacklevel=4,
            )
        if iteration is not None:
            self._load(engine, trainer, folder, by_iteration.get(iteration))

    def _check(self, engine: Any, folder: pathlib.Path, name: str | None) -> list[str]:
        """Return what is wrong with a set of files; the same on all ranks."""
        run, fault = None, None
        if self.is_master:
            assert name is not None
            try:
                with open_any(folder / name) as npz:
                    run = snapshot_files.read_meta(npz).get("run")
            except Exception as error:
                fault = f"{name} of rank {self._rank}: {error}"
        told = engine.allgather_obj((run, fault))
        faults = [other[1] for other in told if other[1] is not None]
        # Files of Chainer's own snapshot extension do not say of which run they are.
        if len({other[0] for other in told if other[0] is not None}) > 1 and not faults:
            faults = ["its files are of different runs"]
        return faults

    def _load(
        self,
        engine: Any,
        trainer: training.Trainer,
        folder: pathlib.Path,
        name: str | None,
    ) -> None:
        content, error = None, None
        if self.is_master:
            assert name is not None
            try:
                content = (folder / name).read_bytes()
            except Exception as failure:
                error = failure
        agree(engine, f"{_LABEL}, reading", error)
        replicas = engine.split(self.master, engine.rank)
        content = replicas.bcast_obj(content)
        replicas.finalize()
        target = self._target(trainer)
        lost: list[str] = []
        changes: list[str] = []
        try:
            with open_any(content) as npz:
                meta = description(npz)
                file = name or f"the file of rank {self.master}"
                lost = snapshot_content.load(target, npz, meta, file, is_own=True)
            # They have been initialized before this extension.
            snapshot_content.initialize_shifts(target)
            if self._restore_hyperparameters and "hyperparameters" in meta:
                changes = snapshot_content.restore_hyperparameters(target, meta)
        except Exception as failure:
            error = failure
        agree(engine, f"{_LABEL}, loading", error)
        told = [
            f"{text} is not in the snapshot that rank {rank} loads"
            for rank, texts in enumerate(engine.allgather_obj(lost))
            for text in texts
        ]
        if changes:
            told.append(f"took over {'; '.join(changes)}")
        if told and engine.rank == 0:
            warnings.warn(f"{_LABEL}: " + "; ".join(told), stacklevel=5)

    def _target(self, trainer: training.Trainer) -> Any:
        target = self.snapshot._target
        return trainer if target is None else target


class _Delegate:
    """Stands for a writer, and has something done before it writes."""

    def __init__(self, writer: Any, write: Any) -> None:
        self._writer = writer
        self._write = write

    def __call__(self, filename: str, outdir: str, target: Any) -> None:
        self._write(filename, outdir, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def _rank_and_size(comm: Any) -> tuple[int, int]:
    if hasattr(comm, "Get_rank"):
        return comm.Get_rank(), comm.Get_size()
    return comm.rank, comm.size


def _with_rank(filename: Any, rank: int) -> Any:
    if callable(filename):
        return lambda trainer: f"{filename(trainer)}.{rank}"
    return f"{filename}.{rank}"
