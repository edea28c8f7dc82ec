"""Trace files: writing, reading, and merging those of several ranks. Needs no MPI."""

from __future__ import annotations

import gzip
import json
import math
import os
import pathlib
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Key of what is ours in a trace, besides what the format asks for.
HEADER = "chainermn_ng_timeline"
VERSION = 1
_NUMBERS = ("pid", "tid", "ts", "dur")


class TraceError(ValueError):
    """A file is no trace of ours, or damaged, or does not belong to the others."""


@dataclass(frozen=True)
class Header:
    """What a trace is of.

    Attributes:
        run: equal in all files of one recording.
        size: number of ranks of the training.
        ranks: those whose events are here, ascending.
        steps: numbers of the updates.
        communicator: its name.
        topology: in words.
        hosts: name of the host of each of ``ranks``.
        clock_error_us: by how much the times of each of ``ranks`` may be off.
    """

    run: str
    size: int
    ranks: list[int]
    steps: list[int]
    communicator: str
    topology: str
    hosts: list[str]
    clock_error_us: list[float]


@dataclass(frozen=True)
class Trace:
    """A header and the events of all its ranks."""

    header: Header
    events: list[dict[str, Any]]


def new_run() -> str:
    """Return a name for a recording that no other has."""
    return uuid.uuid4().hex


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace as JSON, compressed if the name ends in ``.gz``.

    The file is whole or not there: it is renamed when it has been written.

    Raises:
        OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    content = {
        "traceEvents": trace.events,
        "displayTimeUnit": "ms",
        "otherData": {HEADER: {"version": VERSION, **asdict(trace.header)}},
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read what :func:`write_trace` has written.

    Raises:
        OSError: it cannot be read.
        TraceError: it is something else, or damaged.
    """
    data = pathlib.Path(path).read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        content = json.loads(data)
    except (EOFError, OSError, zlib.error) as error:
        raise TraceError(f"{path}: damaged: {error}") from error
    except ValueError as error:
        raise TraceError(f"{path}: no JSON: {error}") from error
    try:
        values = dict(content["otherData"][HEADER])
        version, events = values.pop("version"), content["traceEvents"]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: not written by extensions.Timeline") from error
    if version != VERSION:
        raise TraceError(
            f"{path}: version {version!r} of the file; this chainermn_ng reads "
            f"version {VERSION}"
        )
    try:
        header = Header(**values)
        _check(header, events)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: damaged: {error}") from error
    return Trace(header, events)


def _check(header: Header, events: Any) -> None:
    n = len(header.ranks)
    if not n or len(header.hosts) != n or len(header.clock_error_us) != n:
        raise ValueError(f"{n} ranks, {len(header.hosts)} hosts")
    if not all(
        isinstance(rank, int) and 0 <= rank < header.size for rank in header.ranks
    ):
        raise ValueError(f"ranks {header.ranks} of {header.size}")
    if not isinstance(events, list):
        raise ValueError("its events are no list")
    n_spans = 0
    for event in events:
        if event["ph"] == "X":
            for key in _NUMBERS:
                if not isinstance(event[key], int | float) or not math.isfinite(
                    event[key]
                ):
                    raise ValueError(f"{key} {event[key]!r} of {event['name']}")
            if event["dur"] < 0:
                raise ValueError(f"dur {event['dur']!r} of {event['name']}: below 0")
            event["args"]["step"], event["cat"]
            n_spans += 1
        if event["pid"] not in header.ranks:
            raise ValueError(f"an event of rank {event['pid']!r}")
    if not n_spans:
        raise ValueError("it has no spans")


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Put the traces of different ranks of one recording together.

    Raises:
        TraceError: of different recordings, or a rank that is in two of them.
    """
    first = traces[0].header
    places: dict[int, tuple[Header, int]] = {}
    for trace in traces:
        header = trace.header
        if header.run != first.run:
            raise TraceError(
                f"of different recordings: rank {first.ranks[0]} of "
                f"{first.communicator} on {first.topology}, and rank "
                f"{header.ranks[0]} of {header.communicator} on {header.topology}"
            )
        for i, rank in enumerate(header.ranks):
            if rank in places:
                raise TraceError(f"rank {rank} is in two of the files")
            places[rank] = header, i
    ranks = sorted(places)
    merged = Header(
        first.run,
        first.size,
        ranks,
        sorted({number for trace in traces for number in trace.header.steps}),
        first.communicator,
        first.topology,
        [places[rank][0].hosts[places[rank][1]] for rank in ranks],
        [places[rank][0].clock_error_us[places[rank][1]] for rank in ranks],
    )
    return Trace(merged, [event for trace in traces for event in trace.events])
