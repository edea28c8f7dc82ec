"""Means of observations, weighted, over batches and ranks."""

from __future__ import annotations

import warnings
from typing import Any

import communicators
from chainermn_ng.extensions.observed_values import as_float


class WeightedSums:
    """Sums of values and of their weights, by key.

    What counts as an observation follows Chainer's ``DictSummary``: numbers,
    zero-dimensional arrays and variables of them; a pair is a value with a weight of
    its own. Other values, complex ones too, are left out. Sums are in float64, where
    larger numbers are infinite.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, observation: dict[str, Any], weight: float) -> None:
        """Add one batch's observation.

        Args:
            observation: key -> value, or ``(value, weight)``.
            weight: for the values without one.

        Raises:
            ValueError: a weight that is no number.
        """
        for key, value in observation.items():
            own_weight: float | None = weight
            if isinstance(value, tuple):
                value, own_weight = value[0], as_float(value[1])
                if own_weight is None:
                    raise ValueError(f"the weight given to {key} is not a number")
            number = as_float(value)
            # A zero weight must not turn an infinite value into NaN.
            if number is not None and own_weight:
                self.add_total(key, number * own_weight, own_weight)

    def add_total(self, key: str, total: float, weight: float) -> None:
        """Add a weighted sum, and the sum of its weights, to those of a key."""
        if weight:
            before = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = before[0] + total, before[1] + weight

    def total_of(self, key: str) -> tuple[float, float]:
        """Return the weighted sum of a key, and the sum of its weights."""
        return self._sums.get(key, (0.0, 0.0))

    def mean_over_ranks(
        self, engine: communicators.CommunicatorBase, *, warns: bool = True
    ) -> dict[str, Any]:
        """Return the weighted mean of each key that some rank has. Collective.

        Args:
            engine: whose ranks take part.
            warns: warn on rank 0 if there is no result.

        Returns:
            dict: key -> float, the same on all ranks; empty if no rank has any.
        """
        merged: dict[str, tuple[float, float]] = {}
        for sums in engine.allgather_obj(self._sums):
            for key, (total, weight) in sums.items():
                before = merged.get(key, (0.0, 0.0))
                merged[key] = before[0] + total, before[1] + weight
        if warns and not merged and engine.rank == 0:
            warnings.warn(
                "the evaluation has no result: no rank had a sample to evaluate, or "
                "nothing was reported",
                stacklevel=4,
            )
        return {key: total / weight for key, (total, weight) in merged.items()}
