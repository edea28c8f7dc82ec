"""One clock for the spans of all ranks."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import communicators

#: Exchanges with each host; the quickest counts.
N_ROUNDS = 10
_TAG = 14827


@dataclass(frozen=True)
class ClockReading:
    """How this rank's clock stands to that of rank 0.

    Attributes:
        local_ns: time here when it was read.
        offset_ns: what is added to get rank 0's time.
        error_ns: by how much that may be wrong, at most.
    """

    local_ns: int
    offset_ns: int
    error_ns: int


def read_clock(
    engine: communicators.CommunicatorBase,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> ClockReading:
    """Compare this rank's clock with that of rank 0. Collective.

    Ranks of one host share a clock. The first rank of each other host asks rank 0 for
    the time; the answer is taken to be of the middle between question and answer
    (Cristian, Distributed Computing 3, 1989).

    Args:
        engine: the communicator.
        clock: nanoseconds from any start.
    """
    hosts = engine.allgather_obj(engine.real_host)
    leader = hosts.index(hosts[engine.rank])
    askers = [r for r in range(1, engine.size) if hosts.index(hosts[r]) == r]
    offset_ns, error_ns = 0, 0
    if engine.rank == 0:
        for asker in askers:
            for _ in range(N_ROUNDS):
                engine.recv_obj(asker, _TAG)
                engine.send_obj(clock(), asker, _TAG)
    elif engine.rank in askers:
        offset_ns, error_ns = _ask(engine, clock)
    readings = engine.allgather_obj((offset_ns, error_ns))
    return ClockReading(clock(), *readings[leader])


def _ask(
    engine: communicators.CommunicatorBase, clock: Callable[[], int]
) -> tuple[int, int]:
    found = []
    for _ in range(N_ROUNDS):
        asked = clock()
        engine.send_obj(None, 0, _TAG)
        told = engine.recv_obj(0, tag=_TAG)
        answered = clock()
        found.append((answered - asked, told - (asked + answered) // 2))
    round_trip, offset_ns = min(found)
    return offset_ns, round_trip // 2


@dataclass
class CommonClock:
    """Turns this rank's times into those of rank 0.

    Attributes:
        start_ns: rank 0's time that is 0 in the trace.
        readings: in the order of time; between two of them the clocks drift evenly.
    """

    start_ns: int
    readings: list[ClockReading] = field(default_factory=list)

    @property
    def error_ns(self) -> int:
        """By how much times may be wrong, at most."""
        return max(reading.error_ns for reading in self.readings)

    def of(self, local_ns: int) -> int:
        """Return a time of :func:`time.perf_counter_ns` in nanoseconds of the trace."""
        return local_ns + self._offset_ns(local_ns) - self.start_ns

    def _offset_ns(self, local_ns: int) -> int:
        readings = self.readings
        after = bisect.bisect([r.local_ns for r in readings], local_ns)
        if after == 0:
            return readings[0].offset_ns
        if after == len(readings):
            return readings[-1].offset_ns
        a, b = readings[after - 1], readings[after]
        part = (local_ns - a.local_ns) / (b.local_ns - a.local_ns)
        return a.offset_ns + round(part * (b.offset_ns - a.offset_ns))
