"""When the parts of a collective begin and end: what a timeline is made of.

A communicator whose ``recorder`` is set tells it of every part. Without one it costs a
comparison a part, so the calls stay in the code for good.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

#: The thread that trains.
MAIN_LANE = "main"
#: What is on its way without a thread that works on it.
COMMUNICATION_LANE = "communication"
#: What other threads do, as they record it for the main lane.
BACKGROUND_LANE = "background"


class Recorder(Protocol):
    """Takes the parts of collectives, from any thread."""

    def record(
        self, name: str, start_ns: int, end_ns: int, lane: str, **details: Any
    ) -> None:
        """Take one part that has ended.

        Args:
            name: what was done. Of the buckets of ``allreduce_arrays``: ``"pack"``,
                ``"flight"`` and ``"unpack"``; ``"agreement"`` for the ranks' check.
            start_ns: when it began, by :func:`time.perf_counter_ns`.
            end_ns: when it ended, by the same clock.
            lane: what did it: :data:`MAIN_LANE`, :data:`COMMUNICATION_LANE`.
            details: more to show, e.g. ``bucket`` (its number) and ``nbytes``; what
                JSON can hold.
        """


@dataclass(frozen=True, slots=True)
class Span:
    """One part that was recorded; the fields are the arguments of ``record``."""

    name: str
    start_ns: int
    end_ns: int
    lane: str = MAIN_LANE
    details: dict[str, Any] = field(default_factory=dict)


class SpanRecorder:
    """A recorder that keeps everything in a list.

    The thread that makes it is the main one: what another thread records for
    :data:`MAIN_LANE` goes to :data:`BACKGROUND_LANE`.

    Attributes:
        spans: what was recorded, in the order in which it ended.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._main_thread = threading.get_ident()

    def record(
        self, name: str, start_ns: int, end_ns: int, lane: str, **details: Any
    ) -> None:
        if lane == MAIN_LANE and threading.get_ident() != self._main_thread:
            lane = BACKGROUND_LANE
        # Appending is atomic: threads need no lock.
        self.spans.append(Span(name, start_ns, end_ns, lane, details))


def recorded_span(
    recorder: Recorder | None, name: str, lane: str = MAIN_LANE, **details: Any
) -> contextlib.AbstractContextManager[None]:
    """Return a context whose duration is recorded, unless an error ends it.

    Args:
        recorder: ``None`` for a context that does nothing.
        name: as in :meth:`Recorder.record`.
        lane: as there.
        details: as there.
    """
    if recorder is None:
        return _NOTHING
    return _record(recorder, name, lane, details)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _record(
    recorder: Recorder, name: str, lane: str, details: dict[str, Any]
) -> Iterator[None]:
    start_ns = time.perf_counter_ns()
    yield
    recorder.record(name, start_ns, time.perf_counter_ns(), lane, **details)
