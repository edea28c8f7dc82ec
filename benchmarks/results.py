"""What a measurement gives, and the arithmetic from repetitions to a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class NotHere(Exception):
    """This machine or environment lacks what a row needs; the text says what."""


class BenchmarkError(Exception):
    """A job of a row failed; the text holds what it printed."""


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return how long each repetition took on the rank where it took longest.

    Args:
        by_rank: seconds, by rank and repetition; all ranks have the same number.
    """
    return [max(times) for times in zip(*by_rank, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of one value twice that value."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def spread_of_ratios(
    ours: Sequence[float], other: Sequence[float]
) -> tuple[float, float]:
    """Return the quartiles of the ratios within rounds.

    Args:
        ours, other: seconds by round, from the same rounds.
    """
    return quartiles([a / b for a, b in zip(ours, other, strict=True)])


def fastest(seconds: Mapping[str, Sequence[float]], names: Iterable[str]) -> str:
    """Return the one of ``names`` with the least median; of equal ones the first."""
    return min(names, key=lambda name: statistics.median(seconds[name]))


@dataclass
class Row:
    """One line of the comparison.

    Attributes:
        key: what ``--only`` calls it.
        what: what is measured.
        against: what it is compared with.
        goal: the ratio that is to be reached, at most.
        ours: what was measured, as text.
        peers: what it is compared with, as text, one entry each.
        ratio: ours over the best of the peers; None where there is none.
        spread: the quartiles of that ratio over the rounds, if there are rounds.
        skipped: why there is no ratio.
        failed: whether that is a fault, not something that this machine lacks.
        notes: what a reader has to know.
        seconds: every repetition in seconds by contender, where there are any.
    """

    key: str
    what: str
    against: str
    goal: float
    ours: str = ""
    peers: list[str] = field(default_factory=list)
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    skipped: str | None = None
    failed: bool = False
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None where nothing was measured."""
        return None if self.ratio is None else self.ratio <= self.goal


@dataclass
class Table:
    """Figures that are compared with nothing: a heading, column names and lines."""

    key: str
    title: str
    columns: list[str]
    lines: list[list[str]] = field(default_factory=list)
    skipped: str | None = None
    failed: bool = False
    notes: list[str] = field(default_factory=list)


def compare(
    row: Row,
    seconds: Mapping[str, Sequence[float]],
    ours: Sequence[str],
    peers: Sequence[str],
) -> None:
    """Fill a row: the best of ours against the best of the peers, by medians.

    Args:
        seconds: by contender, one value a round, on the slowest rank.
        ours, peers: which contenders are whose. There must be one of each.
    """
    best, rival = fastest(seconds, ours), fastest(seconds, peers)
    others = [name for name in ours if name != best]
    row.seconds = {name: list(values) for name, values in seconds.items()}
    row.ours = timing(best, seconds[best])
    row.peers = [timing(name, seconds[name]) for name in peers]
    row.ratio = statistics.median(seconds[best]) / statistics.median(seconds[rival])
    row.spread = spread_of_ratios(seconds[best], seconds[rival])
    if others:
        slower = ", ".join(timing(name, seconds[name]) for name in others)
        row.notes.append(f"of our own also measured: {slower}")


def timing(name: str, seconds: Sequence[float]) -> str:
    """Return ``NAME MEDIAN``, such as ``mpi4py:flat 81.2 ms``; ours without a kind."""
    return f"{name.removeprefix('ours:')} {duration(statistics.median(seconds))}"


def duration(seconds: float) -> str:
    """Return a duration with three digits in a unit that fits."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        # What rounds to 1 is written in this unit.
        if abs(seconds) * factor >= 0.9995:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e6:.0f} us"
