"""One observation of all ranks, summed up by a function of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer import training
from chainer.serializer import Deserializer
from chainer.training import extension, util

from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.extensions.observed_values import detached

Aggregator = Callable[[list[list[Any]]], Any]


class ObservationAggregator(extension.Extension):
    """Trainer extension that replaces an observation by one over all ranks.

    Attach it on all ranks. For the plain mean of all that is reported, weighted by
    samples, see :class:`AggregateObservations`.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py.
        original_key: key of the observation. Ranks may lack it, at any iteration;
            when all have lacked it since the last exchange there is no result.
        aggregated_key: key of the result; ``None`` for ``original_key``.
        comm_trigger: when the ranks exchange what they have observed since the last
            time; must fire on all ranks together.
        aggregator: called on rank 0 with one list of values for each rank; by default
            the mean of all values. Numbers, and arrays and variables without
            dimensions, arrive as floats; larger ones as NumPy arrays.

    Snapshots hold what was observed since the last exchange.
    """

    trigger = 1, "iteration"
    priority = extension.PRIORITY_EDITOR
    is_collective = True
    name: str | None = None

    def __init__(
        self,
        comm: Any,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: Any = (1, "iteration"),
        aggregator: Aggregator | None = None,
    ) -> None:
        self.comm = comm
        self.original_key = original_key
        self.aggregated_key = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = util.get_trigger(comm_trigger)
        self.observation_history: list[Any] = []
        self.aggregator = aggregator or mean_of_all

    def __call__(self, trainer: training.Trainer) -> None:
        """Note the observation; exchange and replace it when it is time."""
        summary = self.compute_summary(trainer)
        if summary is not None:
            trainer.observation[self.aggregated_key] = summary

    def compute_summary(self, trainer: training.Trainer) -> Any:
        """Note the observation, and exchange when it is time. Collective then.

        Returns:
            What the aggregator returned, the same on all ranks, a number as a float;
            ``None`` when it is not time, or no rank has observed anything.

        Raises:
            Exception: the aggregator failed: on all ranks, on rank 0 as it is,
                elsewhere as TypeError, ValueError, OSError or RankFailedError.
        """
        if self.original_key in trainer.observation:
            value = trainer.observation[self.original_key]
            self.observation_history.append(detached(value))
        if not self.comm_trigger(trainer):
            return None
        history, self.observation_history = self.observation_history, []
        label = f"ObservationAggregator({self.original_key})"
        with engine_of(self.comm) as engine:
            engine.agree(label)
            everything = engine.gather_obj(history)
            summary, error = None, None
            if everything is not None and any(everything):
                try:
                    summary = detached(self.aggregator(everything))
                except Exception as failure:
                    error = failure
            try:
                engine.agree(f"{label}, aggregator", error=error)
            except Exception:
                if error is not None:
                    raise error from None
                raise
            return engine.bcast_obj(summary)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load what was observed since the last exchange, and the trigger.

        Numbers and arrays can be saved; a snapshot lacks other values, with a warning.
        With a snapshot that has none of it the history begins anew, with a warning.
        """
        try:
            if isinstance(serializer, Deserializer):
                self.observation_history = _loaded(serializer["history"])
            else:
                _save(serializer["history"], self.observation_history)
            if hasattr(self.comm_trigger, "serialize"):
                self.comm_trigger.serialize(serializer["comm_trigger"])
        except KeyError:
            warnings.warn(
                f"the snapshot does not hold what ObservationAggregator("
                f"{self.original_key}) has observed since the last exchange",
                stacklevel=2,
            )


def _save(serializer: chainer.AbstractSerializer, history: list[Any]) -> None:
    kept = [value for value in history if _is_numeric(value)]
    if len(kept) < len(history):
        warnings.warn(
            f"ObservationAggregator: {len(history) - len(kept)} values are neither "
            "numbers nor arrays of them; the snapshot lacks them",
            stacklevel=3,
        )
    # One entry for all floats: an epoch has many.
    is_float = np.array([type(value) is float for value in kept], bool)
    serializer("is_float", is_float)
    serializer("floats", np.array([v for v in kept if type(v) is float], np.float64))
    for number in np.flatnonzero(~is_float):
        serializer(f"value_{number}", np.asarray(kept[number]))


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, float | complex)


def _loaded(serializer: chainer.AbstractSerializer) -> list[Any]:
    is_float, floats = serializer("is_float", None), serializer("floats", None)
    if is_float is None or floats is None:
        raise KeyError("history")
    remaining = iter(np.asarray(floats).tolist())
    history = []
    for number, is_plain in enumerate(np.asarray(is_float)):
        if is_plain:
            history.append(next(remaining))
        else:
            # An array without dimensions was a number of NumPy's.
            history.append(np.asarray(serializer(f"value_{number}", None))[()])
    return history


def mean_of_all(histories: list[list[Any]]) -> Any:
    """Return the mean of all values of all ranks.

    Args:
        histories: one list of values for each rank, not all of them empty.
    """
    values = [value for history in histories for value in history]
    return np.mean(values, axis=0)
