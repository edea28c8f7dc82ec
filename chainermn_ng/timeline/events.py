"""Spans of one rank as events of the Trace Event Format.

Source: "Trace Event Format", the document by which Chrome's tracing and Perfetto read
JSON: complete events ("X") with microseconds, and metadata events ("M") with names.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from communicators.recording import (
    BACKGROUND_LANE,
    COMMUNICATION_LANE,
    MAIN_LANE,
    Span,
)

#: Categories of events.
STEP, WORK, COMMUNICATION = "step", "work", "communication"
#: What another thread does: no work that the step waits for.
BACKGROUND = "background"

#: Spans by which ranks meet, whoever does it.
COMMUNICATION_NAMES = frozenset(
    {"agreement", "average", "flight", "pack", "reduce", "unpack"}
)

#: The time from the begin of a step to its first span, if that is a forward pass.
DATA = "data"
#: The same, if it is another: the program may have computed gradients by then.
BEFORE_UPDATE = "before update"
#: The time from the last span to the end of the step: the trainer's extensions.
AFTER_UPDATE = "after update"

_LANES = (MAIN_LANE, BACKGROUND_LANE, COMMUNICATION_LANE)


@dataclass(frozen=True)
class Step:
    """When a step was, by this rank's clock.

    Attributes:
        number: of the update, from 1.
        start_ns: its begin.
        end_ns: its end.
    """

    number: int
    start_ns: int
    end_ns: int


def category_of(span: Span) -> str:
    """Return :data:`WORK`, :data:`COMMUNICATION` or :data:`BACKGROUND`."""
    if span.name in COMMUNICATION_NAMES:
        return COMMUNICATION
    by_lane = {MAIN_LANE: WORK, BACKGROUND_LANE: BACKGROUND}
    return by_lane.get(span.lane, COMMUNICATION)


def fill_gaps(step: Step, spans: Sequence[Span]) -> list[Span]:
    """Return spans for what nobody records: before and after those of the optimizer.

    Args:
        step: the step.
        spans: of the step, in any order.
    """
    main = [span for span in spans if span.lane == MAIN_LANE]
    if not main:
        return []
    first = min(main, key=lambda span: span.start_ns)
    last_ns = max(span.end_ns for span in main)
    name = DATA if first.name == "forward" else BEFORE_UPDATE
    gaps = [
        Span(name, step.start_ns, first.start_ns),
        Span(AFTER_UPDATE, last_ns, step.end_ns),
    ]
    return [gap for gap in gaps if gap.end_ns > gap.start_ns]


def spans_by_step(steps: Sequence[Step], spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans that began in each step, or after it and before the next."""
    starts = [step.start_ns for step in steps]
    found: list[list[Span]] = [[] for _ in steps]
    for span in spans:
        # What was on its way when recording began is shown with the first step.
        found[max(0, bisect.bisect(starts, span.start_ns) - 1)].append(span)
    return found


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Spread the spans of one lane over rows in which they nest or do not meet.

    Viewers show one that begins in another as a part of it; buckets in flight are side
    by side, so those of one name never go into each other.
    """
    rows: list[list[Span]] = []
    open_in_row: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        place = next((i for i, o in enumerate(open_in_row) if _fits(span, o)), None)
        if place is None:
            place = len(rows)
            rows.append([])
            open_in_row.append([])
        rows[place].append(span)
        open_in_row[place].append(span)
    return rows


def _fits(span: Span, open_spans: list[Span]) -> bool:
    while open_spans and open_spans[-1].end_ns <= span.start_ns:
        open_spans.pop()
    if not open_spans:
        return True
    is_inside = span.end_ns <= open_spans[-1].end_ns
    return is_inside and all(outer.name != span.name for outer in open_spans)


def events_of(
    rank: int,
    host: str,
    steps: Sequence[Step],
    spans: Sequence[Span],
    common_ns: Callable[[int], int],
) -> list[dict[str, Any]]:
    """Return the events of one rank: names first, then steps and spans.

    Args:
        rank: becomes the process's number.
        host: its name.
        steps: what was recorded, in the order of time.
        spans: all spans of these.
        common_ns: from this rank's clock to the trace's.
    """
    numbered: list[tuple[Span, int, str]] = []
    for step, own in zip(steps, spans_by_step(steps, spans), strict=True):
        whole = Span(f"step {step.number}", step.start_ns, step.end_ns)
        numbered.append((whole, step.number, STEP))
        for span in [*own, *fill_gaps(step, own)]:
            numbered.append((span, step.number, category_of(span)))
    labels = {id(span): (number, category) for span, number, category in numbered}
    names, events = _names(rank, host), []
    thread = 0
    for lane in _lanes(numbered):
        own = [span for span, _, _ in numbered if span.lane == lane]
        for i, row in enumerate(rows_of(own)):
            names += _thread_names(rank, thread, lane if i == 0 else f"{lane} {i + 1}")
            events += [
                _event(rank, thread, span, *labels[id(span)], common_ns) for span in row
            ]
            thread += 1
    return names + events


def _lanes(numbered: Sequence[tuple[Span, int, str]]) -> list[str]:
    others = {span.lane for span, _, _ in numbered} - set(_LANES)
    return [*_LANES, *sorted(others)]


def _event(
    rank: int,
    thread: int,
    span: Span,
    number: int,
    category: str,
    common_ns: Callable[[int], int],
) -> dict[str, Any]:
    start_ns = common_ns(span.start_ns)
    return {
        "ph": "X",
        "name": span.name,
        "cat": category,
        "pid": rank,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": (common_ns(span.end_ns) - start_ns) / 1000,
        "args": {"step": number, **span.details},
    }


def _names(rank: int, host: str) -> list[dict[str, Any]]:
    return [
        _metadata(rank, 0, "process_name", name=f"rank {rank} on {host}"),
        _metadata(rank, 0, "process_sort_index", sort_index=rank),
    ]


def _thread_names(rank: int, thread: int, name: str) -> list[dict[str, Any]]:
    return [
        _metadata(rank, thread, "thread_name", name=name),
        _metadata(rank, thread, "thread_sort_index", sort_index=thread),
    ]


def _metadata(rank: int, thread: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}
