"""How long saving takes."""

from __future__ import annotations

import time


class CheckpointStats:
    """Durations of the saves of one rank, in seconds.

    Attributes:
        timings (list): of each save ``{"b": begin, "d": duration}``, the begin in
            seconds since 1970.
    """

    def __init__(self) -> None:
        self.timings: list[dict[str, float]] = []
        self.begin: float | None = None
        self._clock = 0.0

    def start(self) -> None:
        """Note that a save begins."""
        self.begin, self._clock = time.time(), time.perf_counter()

    def end(self) -> None:
        """Note that it has ended."""
        if self.begin is not None:
            duration = time.perf_counter() - self._clock
            self.timings.append({"b": self.begin, "d": duration})
            self.begin = None

    def report(self) -> str:
        """Return mean, shortest and longest duration in words."""
        if not self.timings:
            return "no snapshot has been saved yet"
        durations = [timing["d"] for timing in self.timings]
        return (
            f"{len(durations)} snapshots saved, in seconds: mean "
            f"{sum(durations) / len(durations):.3f}, min {min(durations):.3f}, max "
            f"{max(durations):.3f}"
        )
