"""The texts of errors about ranks that differ: the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: What a collective works on: a text, or ``(name, description)`` of each array.
Details = str | Sequence[tuple[str, str]]

_MAX_DIFFERENCES = 5


class Report(NamedTuple):
    """What a rank tells the others once they know that something differs.

    Attributes:
        sequence: how many collectives it has begun.
        label: the operation.
        details: what must be equal on all ranks.
        failure: class and text of its own error, or ``None``.
        shown: what it works on, where that may differ.
        place: the line of the program that called the operation; may be empty.
    """

    sequence: int
    label: str
    details: Details
    failure: tuple[str, str] | None
    shown: str = ""
    place: str = ""


def failure_text(reports: Sequence[Report]) -> str:
    """Return why an operation failed that all ranks called."""
    texts = _by_text((r, x.failure[1]) for r, x in enumerate(reports) if x.failure)
    text = f"{reports[0].label} failed"
    for number, (why, who) in enumerate(texts):
        text = f"{_clause(text)}; on" if number else f"{text} on"
        text += f" {who}: {why}"
    return _with_places(text, reports)


def difference_text(reports: Sequence[Report]) -> str:
    """Return in what the ranks differ, who differs, and where each of them is."""
    sequence = max(report.sequence for report in reports)
    return _with_places(f"collective {sequence}: {_difference(reports)}", reports)


def _difference(reports: Sequence[Report]) -> str:
    label = reports[0].label
    details = [report.details for report in reports]
    if any(report.label != label for report in reports):
        labels = [f"{x.label} of {x.shown}" if x.shown else x.label for x in reports]
        parts = [f"{who}: {text}" for text, who in _by_text(enumerate(labels))]
        text = "the ranks are in different operations: " + "; ".join(parts)
        for rank, report in enumerate(reports):
            if report.failure:
                text = f"{_clause(text)}; rank {rank} failed with {report.failure[1]}"
        return text
    if all(not isinstance(item, str) for item in details):
        tables = [dict(item) for item in details]  # type: ignore[arg-type]
        found = _array_differences(tables)
        if found or tables[0]:
            found = found or "the same ones in another order"
            return f"{label}: the ranks hold different arrays: {found}"
    texts = _by_text((rank, str(item)) for rank, item in enumerate(details))
    if len(texts) == 1:
        texts = _by_text((r, f"number {x.sequence}") for r, x in enumerate(reports))
        parts = [f"{text} on {who}" for text, who in texts]
        return (
            f"{label}: the ranks have called different numbers of collectives; this "
            f"one is {', '.join(parts)}"
        )
    parts = [f"{text} on {who}" for text, who in texts]
    return f"{label}: the ranks gave different arguments: " + "; ".join(parts)


def _with_places(text: str, reports: Sequence[Report]) -> str:
    places = _by_text((r, x.place) for r, x in enumerate(reports) if x.place)
    if not places:
        return text
    where = places[0][0]
    if len(places) > 1:
        where = ", ".join(f"{place} on {who}" for place, who in places)
    return f"{_clause(text)}; called from {where}"


def _clause(text: str) -> str:
    """Return a text that goes on after a semicolon: without the stop of a sentence."""
    is_sentence = text.endswith(".") and not text.endswith("..")
    return text[:-1] if is_sentence else text


def _by_text(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Group ``(rank, text)`` by text; return pairs of text and its ranks in words."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return [(text, _ranks(ranks)) for text, ranks in groups.items()]


def _array_differences(tables: list[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for table in tables for name in table))
    differences = []
    for name in names:
        found = enumerate(table.get(name, "absent") for table in tables)
        texts = _by_text(found)
        if len(texts) > 1:
            parts = [f"{text} on {who}" for text, who in texts]
            differences.append(f"{name}: " + ", ".join(parts))
    more = len(differences) - _MAX_DIFFERENCES
    text = "; ".join(differences[:_MAX_DIFFERENCES])
    return f"{text}; and {more} more" if more > 0 else text


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...)"
    return "ranks " + ", ".join(map(str, ranks))
