"""Timing collectives: a repetition takes as long as on its slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from communicators.base import CommunicatorBase
from communicators.buckets import ArraySpec

#: Below this number of repetitions a median says little; no budget cuts deeper.
MIN_REPETITIONS = 3
#: Part of a budget that may be spent before what counts.
_WARM_UP_SHARE = 0.25


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Timing:
    """How to time; the same on all ranks.

    Attributes:
        warm_up: calls before the ones that count; at least 1 is made.
        repetitions: most calls that count.
        budget_s: about how long each kind of call may be repeated, in seconds. Calls
            that take long are repeated less often, but 3 times at least.
        clock: seconds, as :func:`time.perf_counter` has them.
        synchronize: returns when the work that this rank has enqueued is done; needed
            for GPUs.
    """

    warm_up: int = 3
    repetitions: int = 20
    budget_s: float = 2.0
    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], object] = _nothing

    def __post_init__(self) -> None:
        if self.warm_up < 0 or self.repetitions < 1 or not self.budget_s > 0:
            raise ValueError(
                f"warm_up {self.warm_up}, repetitions {self.repetitions}, budget_s "
                f"{self.budget_s}: expected at least 0, at least 1, above 0"
            )

    def on_device(self, synchronize: Callable[[], object]) -> Timing:
        """Return the same timing with another ``synchronize``."""
        return replace(self, synchronize=synchronize)

    def plan(self, first_s: float) -> tuple[int, int]:
        """Return how many further warm-up calls and repetitions fit the budget.

        Args:
            first_s: what one call took, in seconds.
        """
        if first_s <= 0.0:
            return max(0, self.warm_up - 1), self.repetitions
        affordable = self.budget_s / first_s
        n_warm = min(self.warm_up - 1, int(affordable * _WARM_UP_SHARE))
        n_min = min(MIN_REPETITIONS, self.repetitions)
        return max(0, n_warm), max(n_min, min(self.repetitions, int(affordable)))


def time_calls(
    comm: CommunicatorBase,
    calls: Sequence[Callable[[], object]],
    timing: Timing,
    progress: Callable[[float], object] | None = None,
) -> list[list[float]]:
    """Time calls that are collective. Collective itself.

    The calls take turns, so that whatever else the machine does falls on all of them.
    Before each, the ranks meet in a barrier.

    Args:
        comm: communicator of all ranks of the calls.
        calls: what to time; the same on all ranks, in the same order.
        timing: how often.
        progress: told which part of the calls has been made, 0 to 1.

    Returns:
        For each of ``calls`` the seconds of its repetitions, each on the rank where it
        took longest; the same numbers on all ranks.
    """
    first = _slowest(comm, [[_time_once(comm, call, timing)] for call in calls])
    plans = [timing.plan(row[0]) for row in first]
    n_rounds = max((sum(plan) for plan in plans), default=0)
    times: list[list[float]] = [[] for _ in calls]
    turns = list(zip(calls, plans, times, strict=True))
    for i in range(n_rounds):
        # There and back: whatever a call leaves behind in caches meets no other always.
        for call, plan, own in turns if i % 2 == 0 else turns[::-1]:
            if i < sum(plan):
                own.append(_time_once(comm, call, timing))
        if progress is not None:
            progress((i + 1) / n_rounds)
    counted = [own[n_warm:] for own, (n_warm, _) in zip(times, plans, strict=True)]
    return _slowest(comm, counted)


def _time_once(
    comm: CommunicatorBase, call: Callable[[], object], timing: Timing
) -> float:
    timing.synchronize()
    comm.barrier()
    start = timing.clock()
    call()
    timing.synchronize()
    return timing.clock() - start


def _slowest(comm: CommunicatorBase, times: list[list[float]]) -> list[list[float]]:
    """Return the maxima over the ranks of lists that are equally long on all."""
    flat = np.array([t for row in times for t in row], np.float64)
    if flat.size:
        # As objects: host memory, whatever kind of arrays the communicator reduces.
        flat = np.max(comm.allgather_obj(flat), axis=0)
    values = iter(flat.tolist())
    return [[next(values) for _ in row] for row in times]


def measure_allreduce_arrays(
    comm: CommunicatorBase,
    candidates: Sequence[CommunicatorBase],
    specs: Sequence[ArraySpec],
    timing: Timing | None = None,
    *,
    op: str = "mean",
    xp: ModuleType = np,
) -> list[float]:
    """Time ``allreduce_arrays`` of several communicators on arrays like given ones.

    Collective. Works on arrays of its own, of the shapes and dtypes of ``specs``.

    Args:
        comm: communicator of all ranks, for what the ranks have to agree on.
        candidates: communicators of the same ranks.
        specs: of the arrays.
        timing: how often.
        op: as in :meth:`CommunicatorBase.allreduce_arrays`.
        xp: NumPy or CuPy, whose arrays are reduced; with CuPy ``timing`` needs
            ``synchronize``.

    Returns:
        Seconds for each candidate: the median over the repetitions, each as long as on
        its slowest rank; the same on all ranks, so that all choose alike.
    """
    arrays: list[Any] = [xp.ones(spec.shape, spec.dtype) for spec in specs]
    calls = [
        lambda candidate=candidate: candidate.allreduce_arrays(arrays, op)
        for candidate in candidates
    ]
    times = time_calls(comm, calls, timing or Timing())
    return [statistics.median(row) for row in times]
