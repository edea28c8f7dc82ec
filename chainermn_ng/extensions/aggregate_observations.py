"""Means over all ranks of everything that is reported in training."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from chainer import training
from chainer.training import extension

from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.extensions.observed_values import as_float
from chainermn_ng.iterators.shard_iterator import ShardIterator


def samples_of_last_batch(trainer: training.Trainer) -> float:
    """Return how many samples the main iterator gave for the last update.

    Works for iterators that know their position in the data set, as Chainer's do.

    Raises:
        TypeError: this one does not, or the updater has no iterator named ``main``.
    """
    try:
        iterator = trainer.updater.get_iterator("main")
        if isinstance(iterator, ShardIterator):
            # Its batches differ in length within an epoch.
            return iterator.n_counted
        now, before = iterator.epoch_detail, iterator.previous_epoch_detail
        # With a sampler an epoch need not be the whole data set.
        n_samples = getattr(iterator, "_epoch_size", len(iterator.dataset))
        return round((now - (before or 0.0)) * n_samples)
    except (AttributeError, KeyError, TypeError) as error:
        raise TypeError(
            "AggregateObservations cannot tell how many samples the last batch had "
            f"({error}); give weight=, a function of the trainer that returns the "
            "number"
        ) from error


class AggregateObservations(extension.Extension):
    """Trainer extension that makes logs show means over all ranks.

    ``trainer.extend(AggregateObservations(comm))``, on all ranks. After each update,
    before :class:`~chainer.training.extensions.LogReport` and other readers, every
    number that was reported (Python's, NumPy's and CuPy's, variables, arrays without
    dimensions) is replaced by its mean over the ranks, a Python float. Complex numbers
    stay as they are; integers beyond the range of floats count as infinite. A key that
    some ranks lack is averaged over the others, and all ranks have it afterwards; one
    that is equal on all of them, as the result of a multi-node evaluator, keeps its
    value. Costs one small exchange an iteration.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py.
        keys: names of those that are aggregated, the same on all ranks; ``None`` for
            all.
        weight: function of the trainer that returns this rank's weight. By default
            the number of samples in the last batch (see
            :func:`samples_of_last_batch`); ``lambda trainer: 1`` weighs all ranks
            alike, as an optimizer without ``count_samples`` does.

    Raises:
        Exception: finding the weight failed on some rank; on all of them.
    """

    trigger = 1, "iteration"
    priority = extension.PRIORITY_EDITOR
    is_collective = True

    def __init__(
        self,
        comm: Any,
        keys: Collection[str] | None = None,
        *,
        weight: Callable[[training.Trainer], float] | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise TypeError(
                f"AggregateObservations: keys={keys!r}: expected a list of names"
            )
        self.comm = comm
        self.keys = None if keys is None else sorted(keys)
        self.weight = weight or samples_of_last_batch

    def __call__(self, trainer: training.Trainer) -> None:
        """Replace the observations by their means. Collective."""
        weight, error = 0.0, None
        try:
            weight = float(self.weight(trainer))
        except Exception as failure:
            error = failure
        observation = trainer.observation
        mine = {
            key: number
            for key, value in observation.items()
            if self.keys is None or key in self.keys
            if (number := as_float(value)) is not None
        }
        with engine_of(self.comm) as engine:
            try:
                engine.agree("AggregateObservations", f"keys={self.keys}", error)
            except Exception:
                if error is not None:
                    raise error from None
                raise
            observation.update(weighted_means(engine.allgather_obj((weight, mine))))


def weighted_means(
    reports: list[tuple[float, dict[str, float]]],
) -> dict[str, float]:
    """Return the mean of each key over the ranks that report it.

    Args:
        reports: weight and observations of each rank. Values of weight 0 count only
            where no rank with that key has more.
    """
    means = {}
    for key in dict.fromkeys(key for _, values in reports for key in values):
        pairs = [(w, values[key]) for w, values in reports if key in values]
        pairs = [pair for pair in pairs if pair[0]] or [(1, v) for _, v in pairs]
        first = pairs[0][1]
        if all(value == first for _, value in pairs):
            # Not even rounded.
            means[key] = first
        else:
            means[key] = sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)
    return means
