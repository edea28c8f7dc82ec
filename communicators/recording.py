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
#: What a communicator does.
COMMUNICATION_LANE = "communication"
#: What other threads record for the main lane.
BACKGROUND_LANE = "background"


class Recorder(Protocol):
    """Is told when the parts of an operation began and ended.

    Set as ``recorder`` of a communicator. Called in the thread that works, between the
    parts, so it should return soon.
    """

    def record(
        self, name: str, start_ns: int, end_ns: int, lane: str, **details: Any
    ) -> None:
        """Take note of one part that has ended.

        Args:
            name: ``"agreement"``, ``"pack"``, ``"flight"``, ``"unpack"`` (of a
                bucket), ``"reduce"`` (of arrays in place).
            start_ns: when it began, by :func:`time.perf_counter_ns`.
            end_ns: when it ended.
            lane: parts of one lane follow each other: ``"communication"``, and
                ``"bucket 0"``, ``"bucket 1"``, ... for what is in flight at once;
                ``"main"`` for what a training does besides.
            details: such as ``bucket`` (its number) and ``nbytes``; what JSON can hold.
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
