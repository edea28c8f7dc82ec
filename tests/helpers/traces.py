"""Checks of trace files, by the format's own rules."""

from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any


def load(path: Any) -> dict[str, Any]:
    """Return the JSON of a trace."""
    data = pathlib.Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def faults(events: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with events, by the Trace Event Format; none: ``[]``."""
    found = []
    rows: dict[Any, list[tuple[float, float]]] = {}
    named = {
        (e["pid"], e["tid"])
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    for event in events:
        if event["ph"] == "M":
            continue
        if event["ph"] != "X" or not isinstance(event["name"], str):
            found.append(f"kind of {event}")
        for key, kind in (("pid", int), ("tid", int), ("ts", float), ("dur", float)):
            if type(event[key]) is not kind:
                found.append(f"{key} of {event}")
        if event["dur"] < 0 or (event["pid"], event["tid"]) not in named:
            found.append(f"place of {event}")
        row = rows.setdefault((event["pid"], event["tid"]), [])
        row.append((event["ts"], event["ts"] + event["dur"]))
    for place, row in rows.items():
        found += [f"{a} and {b} of {place}" for a, b in _crossings(row)]
    return found


def _crossings(row: list[tuple[float, float]]) -> list[Any]:
    """Return pairs that meet without one being a part of the other."""
    slack = 1e-3  # times are rounded to nanoseconds
    return [
        (a, b)
        for i, a in enumerate(row)
        for b in row[i + 1 :]
        if a[1] > b[0] + slack
        and b[1] > a[0] + slack
        and not (a[0] <= b[0] + slack and b[1] <= a[1] + slack)
        and not (b[0] <= a[0] + slack and a[1] <= b[1] + slack)
    ]


def spans_of(
    events: list[dict[str, Any]], name: str, rank: int
) -> list[dict[str, Any]]:
    """Return the events of a name on a rank in the order of time."""
    found = [e for e in events if (e["ph"], e["name"], e["pid"]) == ("X", name, rank)]
    return sorted(found, key=lambda e: e["ts"])
