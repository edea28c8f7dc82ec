"""Every sample of shards of any lengths once an epoch, in equally many steps."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import chainer
import numpy as np
from chainer.serializer import Deserializer

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.datasets.scattered_dataset import padding_mask
from chainermn_ng.iterators.order import global_generator, permutation, seed_from
from communicators import CommunicatorBase


class ShardIterator(chainer.dataset.Iterator):
    """Iterator over this rank's shard, in step with those of the other ranks.

    An epoch has the same number of iterations on all ranks, agreed on here: as many as
    the rank with the most batches needs. Each rank spreads its samples over them as
    evenly as it can. So all samples of all ranks come exactly once an epoch, padding of
    a scattered data set never, and triggers by epoch fire in the same iteration
    everywhere. Where a rank has fewer samples than there are iterations, a batch of it
    holds one sample that is not to count.

    The batches of the ranks then differ in length. For steps equal to those of one
    process on the joined batch, the optimizer has to weigh the ranks by samples::

        train_iter = ShardIterator(shard, 32, comm)
        optimizer = create_multi_node_optimizer(
            Adam(), comm, count_samples=train_iter.count_samples)

    A loss over a batch that does not count is not computed: the rank takes part with
    weight 0. Where the model meets other ranks in its forward pass, it is computed, and
    :class:`~chainermn_ng.links.MultiNodeBatchNormalization` leaves the batch out of the
    joint statistics. The loader is serial; see :doc:`/datasets` for parallel ones.
    Collective.

    Args:
        dataset: this rank's shard, from :func:`~chainermn_ng.scatter_dataset` with any
            options, or any other data set; its length may differ between ranks, and
            be 0.
        batch_size: samples in the largest batch of this rank.
        communicator: communicator of this package, of the engine, or of mpi4py.
        repeat: begin again after an epoch, for ever; with ``False`` there is one.
        shuffle: draw a new order for each epoch, from a generator of the iterator's
            own.
        seed: of that generator, 0 to 2**32 - 1, may be the same on all ranks; ``None``:
            one that follows from NumPy's global generator, from which nothing is drawn.

    Attributes:
        dataset: the shard.
        batch_size (int): see above.
        repeat (bool): see above.
        n_iterations (int): iterations in an epoch, the same on all ranks.
        epoch (int): number of completed epochs, the same on all ranks.
        is_new_epoch (bool): whether the last batch ended an epoch, on all ranks.
        batch_padding (numpy.ndarray): bool, one per sample of the last batch if it is
            not to count, else ``None``. Evaluators look at it.

    Raises:
        ValueError: ``batch_size`` below 1, a bad seed, or no rank has a sample though
            it is to repeat; on all ranks.
        MismatchError: ``repeat`` differs between ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        communicator: Any,
        *,
        repeat: bool = True,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.repeat = repeat
        self._shuffle = shuffle
        self._n_drawn = 0
        number = 0
        if isinstance(communicator, ChainerCommunicator):
            number = communicator.new_iterator_number()
            communicator.has_shard_iterator = True
        with engine_of(communicator) as engine:
            self._agree_on_epoch(engine, f"shard iterator {number}", seed, number)
        self._shows_warnings = communicator.rank == 0
        self._is_asked = self._has_given = False
        self._begin()

    def _agree_on_epoch(
        self, engine: CommunicatorBase, label: str, seed: int | None, number: int
    ) -> None:
        error, facts = None, None
        try:
            if operator.index(self.batch_size) < 1:
                raise ValueError(f"{label}: batch_size {self.batch_size} is below 1")
            self._seed = self._checked_seed(seed, number * engine.size + engine.rank)
            self._own = _own_samples(self.dataset)
            facts = len(self._own), -(-len(self._own) // self.batch_size)
        except (TypeError, ValueError) as failure:
            error = failure
        engine.agree(label, f"repeat={self.repeat}", error)
        lengths, n_batches = zip(*engine.allgather_obj(facts), strict=True)
        self._lengths = np.array(lengths, np.int64)
        self.n_iterations = max(n_batches)
        if self.n_iterations == 0 and self.repeat:
            raise ValueError(f"{label}: no rank has a sample")
        self._filler = self._find_filler(engine, label)
        # Batches that differ in length anywhere make a plain average of ranks wrong.
        self._is_uneven = len(set(lengths)) > 1

    @staticmethod
    def _checked_seed(seed: int | None, purpose: int) -> int:
        if seed is None:
            return seed_from(global_generator(), purpose)
        if not 0 <= operator.index(seed) < 2**32:
            raise ValueError(f"seed {seed}: expected 0 to 2**32 - 1")
        return operator.index(seed)

    def _find_filler(self, engine: CommunicatorBase, label: str) -> Any:
        """Give a rank that has no sample one of another rank's, which never counts."""
        if self._lengths.min() > 0 or self.n_iterations == 0:
            return None
        donor = int(np.argmax(self._lengths))
        sample, error = None, None
        if engine.rank == donor:
            try:
                sample = self.dataset[int(self._own[0])]
            except Exception as failure:
                error = failure
        engine.agree(f"{label}, a sample for ranks without", error=error)
        return engine.bcast_obj(sample, root=donor)

    def _begin(self) -> None:
        self.epoch = 0
        self.is_new_epoch = False
        self.batch_padding: np.ndarray | None = None
        self.previous_epoch_detail: float | None = None
        self._iteration = 0
        self._n_counted = 0
        self._draw_order()

    def _draw_order(self) -> None:
        self._n_drawn += 1
        self._order = self._own
        if self._shuffle:
            chosen = permutation(self._seed, self._n_drawn, len(self._own))
            self._order = self._own[chosen]

    # -- batches ---------------------------------------------------------------------

    def __next__(self) -> list[Any]:
        if self.n_iterations == 0 or (not self.repeat and self.epoch > 0):
            raise StopIteration
        self._warn_if_not_asked()
        begin = self.current_position
        previous = self.epoch_detail
        end = self._position(self._iteration + 1)
        batch = [self.dataset[int(i)] for i in self._order[begin:end]]
        self._n_counted, self.batch_padding = len(batch), None
        if not batch:
            batch, self.batch_padding = [self._repeated_sample()], np.ones(1, bool)
        self.previous_epoch_detail = previous
        self._iteration += 1
        self.is_new_epoch = self._iteration == self.n_iterations
        if self.is_new_epoch:
            self._iteration = 0
            self.epoch += 1
            self._draw_order()
        return batch

    next = __next__

    def _position(self, iteration: int) -> int:
        return len(self._own) * iteration // self.n_iterations

    def _repeated_sample(self) -> Any:
        if len(self._own):
            return self.dataset[int(self._own[0])]
        return self._filler

    def count_samples(self, *args: Any, **kwargs: Any) -> int:
        """Return how many samples of the last batch count.

        For the argument ``count_samples`` of
        :func:`~chainermn_ng.create_multi_node_optimizer`.

        Args:
            args: ignored: what the loss function gets.
            kwargs: ignored.
        """
        self._is_asked = True
        return self._n_counted

    @property
    def n_counted(self) -> int:
        """Number of samples of the last batch that count."""
        return self._n_counted

    def _warn_if_not_asked(self) -> None:
        # At the second batch the optimizer has had its first.
        has_given, self._has_given = self._has_given, True
        if not (has_given and self.repeat and self._is_uneven and not self._is_asked):
            return
        self._is_asked = True
        if self._shows_warnings:
            warnings.warn(
                "the shards differ in length, and so do the ranks' batches, but the "
                "optimizer weighs all ranks alike; give count_samples="
                "iterator.count_samples to create_multi_node_optimizer",
                stacklevel=3,
            )

    # -- state -----------------------------------------------------------------------

    @property
    def current_position(self) -> int:
        """Number of this rank's samples of the epoch that have been given out."""
        return self._position(self._iteration) if self.n_iterations else 0

    @property
    def epoch_detail(self) -> float:
        """Epochs with the part of the current one; the same on all ranks."""
        return self.epoch + self._iteration / max(self.n_iterations, 1)

    @property
    def _epoch_size(self) -> int:
        return len(self._own)

    def reset(self) -> None:
        """Begin at the first epoch again, in a new order if it shuffles."""
        self._begin()

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the state, with that of the order's generator.

        A snapshot made with other lengths of shards, or other batches, cannot say which
        samples of its epoch are left: with a warning the epoch begins anew.
        """
        lengths = serializer("lengths", self._lengths if _saves(serializer) else None)
        n_iterations = int(serializer("n_iterations", self.n_iterations))
        self.epoch = int(serializer("epoch", self.epoch))
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        self._iteration = int(serializer("iteration_in_epoch", self._iteration))
        previous = self.previous_epoch_detail
        previous = float(
            serializer("previous_epoch_detail", -1.0 if previous is None else previous)
        )
        self.previous_epoch_detail = None if previous < 0 else previous
        self._seed = int(serializer("seed", self._seed))
        self._n_drawn = int(serializer("n_drawn", self._n_drawn))
        if _saves(serializer):
            return
        self._n_drawn -= 1
        self._draw_order()
        # None: the place in the epoch has been converted to these shards.
        same = lengths is None or np.array_equal(lengths, self._lengths)
        if not (same and n_iterations == self.n_iterations) and self._iteration:
            self._iteration = 0
            if self._shows_warnings:
                warnings.warn(
                    f"the snapshot is of shards of {np.asarray(lengths).tolist()} "
                    f"samples in {n_iterations} iterations, here are "
                    f"{self._lengths.tolist()} "
                    f"in {self.n_iterations}: epoch {self.epoch} begins anew",
                    stacklevel=2,
                )


def _saves(serializer: Any) -> bool:
    return not isinstance(serializer, Deserializer)


def _own_samples(dataset: Any) -> np.ndarray:
    """Return the indices of the samples that are no padding."""
    mask = padding_mask(dataset)
    n_samples = len(dataset)
    return np.arange(n_samples) if mask is None else np.flatnonzero(~mask)
