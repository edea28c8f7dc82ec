"""The checkpointer: snapshots of all ranks, from which training goes on as it was."""

from __future__ import annotations

import logging
import operator
import pathlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from chainer import training
from chainer.iterators import MultiprocessIterator, ShuffleOrderSampler
from chainer.training import extension

import communicators
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.extensions import snapshot_content, snapshot_files, snapshot_sets
from chainermn_ng.extensions.checkpoint_stats import CheckpointStats
from chainermn_ng.extensions.snapshot_names import SetKey, SnapshotNames
from chainermn_ng.extensions.snapshot_sets import FoundSet, agree

_logger = logging.getLogger("chainermn_ng")


def create_multi_node_checkpointer(
    name: str,
    comm: Any,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | None = None,
    *,
    remove_on_success: bool = False,
    restore_hyperparameters: bool = True,
    generators: Iterable[Any] = (),
) -> MultiNodeCheckpointer:
    """Create the extension that saves all ranks' state and loads it again.

    ::

        checkpointer = chainermn_ng.create_multi_node_checkpointer("run1", comm)
        trainer.extend(checkpointer, trigger=(1000, "iteration"))
        checkpointer.maybe_load(trainer)
        trainer.run()

    Not collective. Attach it on all ranks, with the same trigger.

    Args:
        name: of the run. Only one job at a time may write under a name in a folder.
        comm: communicator of this package, of the engine, or of mpi4py.
        cp_interval: number of sets of snapshots that are kept at least.
        gc_interval: after how many more of them the older ones are removed.
        path: the folder, which the ranks need not share; that of the trainer by
            default.
        remove_on_success: remove all sets when the training has ended without an
            exception, as ChainerMN does after every end.
        restore_hyperparameters: give the optimizers the learning rate and other
            hyperparameters that they had, not those in the script. What the script
            changes in them is lost then, with a warning.
        generators: objects that draw random numbers from generators of their own:
            the generators, or what holds them. Those of the updater's iterators and
            their data sets are found without.

    Raises:
        TypeError, ValueError: a bad argument.
    """
    return MultiNodeCheckpointer(
        name,
        comm,
        cp_interval,
        gc_interval,
        path,
        remove_on_success=remove_on_success,
        restore_hyperparameters=restore_hyperparameters,
        generators=generators,
    )


class MultiNodeCheckpointer(extension.Extension):
    """Made by :func:`~chainermn_ng.create_multi_node_checkpointer`.

    Attributes:
        name (str): of the run.
        comm: the communicator.
        cp_interval (int): number of sets that are kept at least.
        gc_interval (int): after how many more the older ones are removed.
        path (str): the folder; ``None`` until it is known.
        stats (CheckpointStats): how long saving took.
    """

    trigger = 1, "iteration"
    #: Below all others: what they change in an iteration belongs into its snapshot.
    priority = -200
    is_collective = True

    def __init__(
        self,
        name: str,
        comm: Any,
        cp_interval: int,
        gc_interval: int,
        path: str | None,
        *,
        remove_on_success: bool = False,
        restore_hyperparameters: bool = True,
        generators: Iterable[Any] = (),
    ) -> None:
        self.name = name
        self.comm = comm
        self.cp_interval = _positive(cp_interval, "cp_interval")
        self.gc_interval = _positive(gc_interval, "gc_interval")
        self.path = path
        self.stats = CheckpointStats()
        self._names = SnapshotNames(name)
        self._remove_on_success = remove_on_success
        self._restore_hyperparameters = restore_hyperparameters
        self._generators = list(generators)
        # Sets that are there, oldest first; equal on all ranks.
        self._sets: list[SetKey] = []
        self._has_written = False
        self._has_looked = False
        self._resumed: tuple[Any, bool] | None = None
        self._outer_error: BaseException | None = None

    # -- saving ----------------------------------------------------------------------

    def __call__(self, trainer: training.Trainer) -> None:
        """Save the trainer; called by it."""
        self._settle_path(trainer)
        self.save(trainer, trainer.updater.iteration)

    def save(self, target: Any, iteration: int) -> None:
        """Save this rank's state of an object. Collective.

        On return the new set is complete, on the disks of all ranks.

        Args:
            target: mostly a trainer; anything that Chainer can serialize.
            iteration: number of the set, the same on all ranks.

        Raises:
            OSError: some rank cannot write; raised on all ranks, and all older sets
                are as they were.
            MismatchError: the ranks gave different iterations.
            ValueError: a negative iteration; on all ranks.
        """
        self.stats.start()
        folder = self._folder()
        content, error = None, None
        try:
            iteration = operator.index(iteration)
            if iteration < 0:
                raise ValueError(f"iteration={iteration}: expected 0 or more")
            arrays, meta = snapshot_content.collect(target, self._generators)
            model = snapshot_content.parameters_digest(target, arrays)
            content = arrays, meta, model
        except Exception as failure:
            error = failure
        with engine_of(self.comm) as engine:
            key = snapshot_sets.write_set(
                engine, self._names, folder, iteration, content, error
            )
            if not self._has_written:
                self._has_written = True
                self._warn_once(engine, target, folder, key)
            self._sets.append(key)
            if len(self._sets) - self.cp_interval >= self.gc_interval:
                del self._sets[: -self.cp_interval]
                snapshot_sets.remove_sets(engine, self._names, folder, self._sets)
        self.stats.end()

    def _warn_once(
        self,
        engine: communicators.CommunicatorBase,
        target: Any,
        folder: pathlib.Path,
        key: SetKey,
    ) -> None:
        if engine.rank != 0:
            return
        newest = max(self._names.listing(folder), default=key)
        if newest > key and not self._has_looked:
            warnings.warn(
                f"snapshot {self.name!r}: {folder} holds files of iteration "
                f"{newest[0]}, of another run: a resume would take these, not those "
                f"of iteration {key[0]}, which this run writes. Give each run a name "
                "of its own, or call maybe_load()",
                stacklevel=3,
            )
        for iterator in getattr(
            getattr(target, "updater", target), "_iterators", {}
        ).values():
            if isinstance(iterator, MultiprocessIterator) and isinstance(
                iterator.order_sampler, ShuffleOrderSampler
            ):
                warnings.warn(
                    f"snapshot {self.name!r}: the thread of MultiprocessIterator "
                    "draws the order of the samples ahead of time, so the order after "
                    "a resume will be another one. With order_sampler="
                    "chainermn_ng.datasets.SeededOrder(seed) it will not",
                    stacklevel=3,
                )

    # -- loading ---------------------------------------------------------------------

    def maybe_load(
        self, trainer: Any, optimizer: Any = None, path: str | None = None
    ) -> int | None:
        """Load the newest set that is whole on all ranks, if there is one. Collective.

        Before the first update. Extensions may be added to the trainer before or
        after it. What is skipped, and what cannot be restored, rank 0 tells by
        warnings.

        Args:
            trainer: what was saved.
            optimizer: a multi-node optimizer that is not the trainer's. If all ranks
                hold the same parameters after the load, its next update sends none.
            path: the folder, where none was given to the constructor.

        Returns:
            int: the iteration, or ``None`` if training starts afresh.

        Raises:
            OSError: a folder cannot be read; on all ranks.
            KeyError, ValueError, TypeError: a whole file does not fit this program,
                such as another model. Raised on all ranks as the nearest class that
                they share; the trainer may have been changed in part.
        """
        if self.path is None and path is not None:
            self.path = path
        self._settle_path(trainer)
        folder = self._folder()
        self._has_looked = True
        with engine_of(self.comm) as engine:
            found, faults = snapshot_sets.find_set(engine, self._names, folder)
            if found is None:
                self._tell_of_fresh_start(engine, folder, faults)
                return None
            lost = self._load(engine, folder, found, trainer, optimizer)
            self._sets = [*reversed(found.older), found.key]
            self._tell(engine, found, engine.allgather_obj(lost))
        return found.key[0]

    def resume(
        self, trainer: Any, optimizer: Any = None, path: str | None = None
    ) -> int:
        """Load as :meth:`maybe_load` does; that there is nothing is an error.

        Raises:
            FileNotFoundError: no set can be loaded; on all ranks.
        """
        iteration = self.maybe_load(trainer, optimizer, path)
        if iteration is None:
            raise FileNotFoundError(
                f"snapshot {self.name!r}: no set in {self.path} can be loaded"
            )
        return iteration

    def _load(
        self,
        engine: communicators.CommunicatorBase,
        folder: pathlib.Path,
        found: FoundSet,
        target: Any,
        optimizer: Any,
    ) -> list[str]:
        """Load this rank's file; return what could not be restored, in words."""
        is_own = found.is_own(engine.rank)
        lost: list[str] = []
        error = None
        with snapshot_sets.open_set(engine, self._names, folder, found) as npz:
            try:
                meta = snapshot_files.read_meta(npz)
                file = self._names.finished(found.files[engine.rank], found.key)
                lost += snapshot_content.load(target, npz, meta, file, is_own=is_own)
                self._resumed = meta, is_own
                lost += self._restore_generators(target)
            except Exception as failure:
                error = failure
            agree(engine, f"snapshot {self.name!r}, loading {found.key[0]}", error)
        if not isinstance(target, training.Trainer):
            # A trainer's extensions may take the rate in the script for the first one,
            # so there it waits for the start of the run.
            self._settle_hyperparameters(engine, target)
        optimizers = list(snapshot_content.optimizers_of(target).values())
        for each in optimizers + ([] if optimizer is None else [optimizer]):
            if hasattr(each, "assume_in_step"):
                # The model need not have been in the snapshot.
                digest = snapshot_content.digest_of_model(each.target)
                if len(set(engine.allgather_obj(digest))) == 1:
                    each.assume_in_step()
        return lost

    def _restore_generators(self, target: Any) -> list[str]:
        assert self._resumed is not None
        meta, is_own = self._resumed
        if not is_own:
            return ["the random generators, and the order of the samples"]
        return snapshot_content.restore_generators(target, meta, self._generators)

    def _settle_hyperparameters(
        self, engine: communicators.CommunicatorBase, target: Any
    ) -> None:
        assert self._resumed is not None
        if not self._restore_hyperparameters:
            return
        meta = self._resumed[0]
        changes = snapshot_content.restore_hyperparameters(target, meta)
        if changes and engine.rank == 0:
            warnings.warn(
                f"snapshot {self.name!r}: took over from it "
                + "; ".join(changes)
                + ". With restore_hyperparameters=False the script decides",
                stacklevel=4,
            )

    def _tell_of_fresh_start(
        self,
        engine: communicators.CommunicatorBase,
        folder: pathlib.Path,
        faults: list[str],
    ) -> None:
        if engine.rank != 0:
            return
        text = f"snapshot {self.name!r}: training starts afresh, "
        if faults:
            warnings.warn(
                f"{text}for no set in {folder} can be loaded: " + "; ".join(faults),
                stacklevel=4,
            )
        else:
            _logger.info("%sfor there is no file of it in %s", text, folder)

    def _tell(
        self,
        engine: communicators.CommunicatorBase,
        found: FoundSet,
        lost: list[list[str]],
    ) -> None:
        if engine.rank != 0:
            return
        text = f"snapshot {self.name!r}: resumed at iteration {found.key[0]}"
        _logger.info("%s, saved by %d ranks", text, found.size)
        if found.faults:
            why = "skipped" if found.is_whole else "no set is whole"
            warnings.warn(f"{text}; {why}: " + "; ".join(found.faults), stacklevel=4)
        by_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(lost):
            for each in texts:
                by_text.setdefault(each, []).append(rank)
        if by_text:
            parts = [f"{each} (ranks {ranks})" for each, ranks in by_text.items()]
            warnings.warn(
                f"{text}, saved by {found.size} ranks, loaded on {engine.size}; not "
                "restored: " + "; ".join(parts),
                stacklevel=4,
            )

    # -- the trainer's calls ---------------------------------------------------------

    def initialize(self, trainer: training.Trainer) -> None:
        """Called by the trainer when its run begins, after the other extensions."""
        self._settle_path(trainer)
        self._outer_error = sys.exception()
        if self._resumed is None:
            return
        # Building the rest of the program may have drawn numbers since the load.
        self._restore_generators(trainer)
        with engine_of(self.comm) as engine:
            self._settle_hyperparameters(engine, trainer)

    def finalize(self) -> None:
        """Called by the trainer when its run ends.

        Removes all files if that was asked for, unless the run ends by an exception.
        """
        if self._remove_on_success and sys.exception() is self._outer_error:
            self.remove_all()
        self._outer_error = None

    def remove_all(self) -> None:
        """Remove all sets of this name. Collective."""
        folder = self._folder()
        with engine_of(self.comm) as engine:
            error = None
            try:
                snapshot_sets.remove_sets(engine, self._names, folder, [])
            except OSError as failure:
                error = failure
            agree(engine, f"snapshot {self.name!r}, removing", error)
        self._sets = []

    def get_stats(self) -> str:
        """Return how long saving took on this rank, in words."""
        return self.stats.report()

    def _settle_path(self, trainer: Any) -> None:
        if self.path is None and isinstance(trainer, training.Trainer):
            self.path = trainer.out

    def _folder(self) -> pathlib.Path:
        if self.path is None:
            raise ValueError(
                f"snapshot {self.name!r}: give the checkpointer a path; only a trainer "
                "has a folder of its own"
            )
        return pathlib.Path(self.path)


def _positive(value: Any, what: str) -> int:
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{what}={value}: expected 1 or more")
    return number
