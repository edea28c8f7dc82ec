"""What an operation tells about the time it takes, to whoever wants to know."""

from __future__ import annotations

from typing import Any, Protocol


class Recorder(Protocol):
    """Is told when the parts of an operation began and ended.

    Set as ``recorder`` of a communicator. Called in the thread that works, between the
    parts, so it should return soon.
    """

    def record(
        self, name: str, start_ns: int, end_ns: int, lane: str, **details: Any
    ) -> None:
        """Take note of one part.

        Args:
            name: ``"agreement"``, ``"pack"``, ``"flight"``, ``"unpack"`` (of a
                bucket), ``"reduce"`` (of arrays in place).
            start_ns: when it began, by :func:`time.perf_counter_ns`.
            end_ns: when it ended.
            lane: parts of one lane follow each other: ``"communication"``, and
                ``"bucket 0"``, ``"bucket 1"``, ... for what is in flight at once.
            details: such as ``bucket`` (its number) and ``nbytes``.
        """
