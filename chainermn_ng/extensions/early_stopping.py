"""Stopping all ranks together when a value gets better no more."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer.serializer import Deserializer
from chainer.training.triggers import EarlyStoppingTrigger

from chainermn_ng.communicators.factory import lasting_engine_of
from chainermn_ng.extensions.weighted_sums import WeightedSums


class MultiNodeEarlyStoppingTrigger:
    """Stop trigger that decides the same on all ranks.

    At each check it takes the mean of the monitored value over the iterations since the
    last check and over all ranks; ranks that have not reported it add nothing. So every
    rank compares the same number, and all stop in the same iteration. A mean that is
    NaN, be it because of one rank, is no improvement. Use it on all ranks as the stop
    trigger of the trainer; the checks are collective.

    Args:
        comm: communicator of this package, or of the engine.
        check_trigger (tuple): when to compare: a number, and ``"epoch"`` or
            ``"iteration"``. It must fire in the same iterations on all ranks.
        monitor (str): key of the observation.
        patience (int): stop after so many checks in a row without a better value;
            ``None`` for 3. ``patients`` is the old name.
        mode (str): ``"max"``, ``"min"``, or ``"auto"``: ``"max"`` for keys with
            ``accuracy`` in them.
        verbose (bool): tell on rank 0 what happens.
        max_trigger (tuple): the end of the training in any case.
        suffix (str): the mean is added to rank's observation under the key ``monitor +
            suffix``.

    Raises:
        TypeError: unknown arguments, or another kind of communicator.
    """

    is_collective = True

    def __init__(
        self,
        comm: Any,
        *,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
        suffix: str = "_aggregated",
        **kwargs: Any,
    ) -> None:
        self._engine = lasting_engine_of(comm)
        self._monitor = monitor
        self._mean_key = monitor + suffix
        self._sums = WeightedSums()
        self._seen_iteration = -1
        self._trainer: Callable[[], chainer.training.Trainer | None] = _nobody
        self.actual_trigger = EarlyStoppingTrigger(
            check_trigger=check_trigger,
            monitor=self._mean_key,
            patience=patience,
            mode=mode,
            verbose=verbose and self._engine.rank == 0,
            max_trigger=max_trigger,
            **kwargs,
        )

    def __call__(self, trainer: chainer.training.Trainer) -> bool:
        """Tell whether to stop. Collective when a check is due."""
        observation = trainer.observation
        self._trainer = weakref.ref(trainer)
        self._add(self._sums, trainer)
        self._seen_iteration = trainer.updater.iteration
        actual = self.actual_trigger
        if actual._max_trigger(trainer):
            return True
        if not actual._interval_trigger(trainer):
            return False
        self._engine.agree(f"early stopping by {self._monitor}")
        sums, self._sums = self._sums, WeightedSums()
        mean = sums.mean_over_ranks(self._engine, warns=False).get(self._monitor)
        if mean is None:
            if self._engine.rank == 0:
                warnings.warn(
                    f"early stopping: no rank has reported {self._monitor} since the "
                    "last check",
                    stacklevel=2,
                )
            return False
        observation[self._mean_key] = mean
        return self._is_over(mean, trainer)

    def _is_over(self, value: float, trainer: chainer.training.Trainer) -> bool:
        actual = self.actual_trigger
        # NaN compares as worse.
        if actual._compare(value, actual.best):
            actual.best, actual.count = value, 0
        else:
            actual.count += 1
        if not actual._stop_condition():
            return False
        if actual.verbose:
            print(f"Epoch {trainer.updater.epoch}: early stopping")
        return True

    def _add(self, sums: WeightedSums, trainer: chainer.training.Trainer) -> None:
        if self._monitor in trainer.observation:
            sums.add({self._monitor: trainer.observation[self._monitor]}, 1)

    def get_training_length(self) -> Any:
        """Return the end of the training in any case, for progress bars."""
        return self.actual_trigger.get_training_length()

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the best value and the patience that is left.

        With a snapshot that lacks them it starts to compare anew, with a warning.
        """
        actual = self.actual_trigger
        try:
            actual.best = float(serializer("best", actual.best))
            actual.count = int(serializer("count", actual.count))
            total, weight = serializer("sums", self._sums_to_save())
        except KeyError:
            warnings.warn(
                "the snapshot does not hold the state of the early stopping: the best "
                "value so far is forgotten",
                stacklevel=2,
            )
            return
        if isinstance(serializer, Deserializer):
            self._sums = WeightedSums()
            self._sums.add_total(self._monitor, float(total), float(weight))
        for name, trigger in (
            ("check", actual._interval_trigger),
            ("max", actual._max_trigger),
        ):
            if hasattr(trigger, "serialize"):
                trigger.serialize(serializer[name])

    def _sums_to_save(self) -> np.ndarray:
        """Return sum and weight with what this iteration has reported.

        A snapshot is made before the stop trigger looks at the iteration, and the
        trainer does not save what was observed.
        """
        sums = WeightedSums()
        sums.add_total(self._monitor, *self._sums.total_of(self._monitor))
        trainer = self._trainer()
        if trainer is not None and trainer.updater.iteration > self._seen_iteration:
            self._add(sums, trainer)
        return np.array(sums.total_of(self._monitor), np.float64)


def _nobody() -> None:
    return None
