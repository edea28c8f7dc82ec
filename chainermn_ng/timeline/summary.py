"""What a trace says: times of the phases, exposed communication, the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chainermn_ng.timeline.events import COMMUNICATION, STEP, WORK
from chainermn_ng.timeline.trace_files import Trace

#: In which order phases are shown; others follow.
_ORDER = (
    *("data", "before update", "forward", "backward", "average"),
    *("agreement", "reduce", "pack", "flight", "unpack", "update", "after update"),
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class RankSummary:
    """Medians over the steps of one rank, in seconds.

    Attributes:
        rank: its number.
        host: its host's name.
        step_s: of a whole step.
        phases_s: name -> time in which it went on, once where it overlaps itself.
        exposed_s: time in which the rank only communicated.
        work_s: time in which it did work of its own.
        n_flights: buckets that it sent a step.
    """

    rank: int
    host: str
    step_s: float
    phases_s: dict[str, float]
    exposed_s: float
    work_s: float
    n_flights: float


@dataclass(frozen=True)
class Summary:
    """What a trace says.

    Attributes:
        ranks: one entry a rank.
        phases: names of the phases, in the order to show them.
    """

    ranks: list[RankSummary]
    phases: list[str]

    @property
    def slowest(self) -> RankSummary:
        """The rank with the most work of its own: the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.work_s)


def summarise(trace: Trace) -> Summary:
    """Return the medians of all ranks of a trace."""
    ranks = [
        _summarise_rank(rank, host, [e for e in trace.events if e["pid"] == rank])
        for rank, host in zip(trace.header.ranks, trace.header.hosts, strict=True)
    ]
    found = {name for rank in ranks for name in rank.phases_s}
    known = [name for name in _ORDER if name in found]
    return Summary(ranks, [*known, *sorted(found - set(known))])


def _summarise_rank(
    rank: int, host: str, events: Sequence[dict[str, Any]]
) -> RankSummary:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_step.setdefault(event["args"]["step"], []).append(event)
    steps = [_Step(own) for own in by_step.values()]
    names = {name for step in steps for name in step.phases}
    return RankSummary(
        rank,
        host,
        _median(step.seconds for step in steps),
        {
            name: _median(_length(step.phases.get(name, [])) for step in steps)
            for name in names
        },
        _median(step.exposed_s for step in steps),
        _median(_length(step.work) for step in steps),
        _median(step.n_flights for step in steps),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


class _Step:
    """Intervals of one step of one rank, in seconds."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self.phases: dict[str, list[Interval]] = {}
        self.work: list[Interval] = []
        communication: list[Interval] = []
        self.seconds = 0.0
        self.n_flights = 0
        for event in events:
            start = event["ts"] * 1e-6
            interval = start, start + event["dur"] * 1e-6
            if event["cat"] == STEP:
                self.seconds = interval[1] - interval[0]
                continue
            self.phases.setdefault(event["name"], []).append(interval)
            self.n_flights += event["name"] == "flight"
            if event["cat"] == WORK:
                self.work.append(interval)
            elif event["cat"] == COMMUNICATION:
                communication.append(interval)
        both = _length([*self.work, *communication])
        self.exposed_s = both - _length(self.work)


def _length(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
