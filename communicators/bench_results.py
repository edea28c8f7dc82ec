"""What a measurement of communicators found: rows, their arithmetic, the JSON file.

Needs neither MPI nor NumPy. The file is one JSON object::

    {
      "schema": "chainermn-ng bench",
      "version": 1,
      "date": "2026-11-30T12:00:00+00:00",
      "machine": {
        "mpi": "MPICH Version: 5.0.2",
        "python": "3.11.15",
        "packages": {"chainermn-ng": "0.1.0", "numpy": "2.4.6", ...},
        "ranks": 4,
        "topology": "2x2",
        "hosts": [{"name": "node1", "cores": 2, "ranks": 2}, ...],
        "is_pretended": false,
        "device": "cpu"
      },
      "settings": {"warm_up": 3, "repetitions": 20, "budget_s": 2.0},
      "rows": [
        {
          "communicator": "multi_ring",
          "options": {"dims": [2, 2], "n_chunks": 8},
          "operation": "allreduce_arrays",
          "dtype": "float32",
          "wire_dtype": null,
          "load": "resnet50",
          "n_arrays": 161,
          "nbytes": 102228128,
          "times_s": [0.21, 0.20, ...],
          "skipped": null
        }, ...
      ],
      "same_way": false,
      "recommended": "comm = chainermn_ng.create_communicator(...)"
    }

- ``hosts`` are the real ones, in the order of their first ranks; ``topology`` is what
  the communicators went by (:meth:`Topology.parse` reads it); ``is_pretended`` says
  that the machines have another one.
- ``communicator`` is a name of the registry, or ``"mpi"``: the bare operation of the
  MPI library on one flat array.
- ``options`` are those given to ``create_communicator``; JSON has lists for tuples.
- ``load`` is a name of :mod:`communicators.gradient_sets`, or null for one array of
  ``nbytes`` bytes.
- ``nbytes`` are those of the arrays, whatever dtype they travel in (``wire_dtype``,
  null: their own). For allgather and reduce_scatter those of the whole array, n times
  what a rank has or keeps; for alltoall those of all blocks of one rank.
- ``times_s`` has one entry a repetition, in the order in which they were made: seconds
  on the rank where it took longest. Empty where ``skipped`` tells why.
- ``same_way`` is true where all communicators in the rows, but ``dummy``, reduce these
  arrays in the same way, so that what is between them is chance.
- ``recommended`` is null where nothing was measured.

Versions: readers refuse other numbers than theirs. New keys may come without a new
number; a changed meaning has one.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SCHEMA = "chainermn-ng bench"
VERSION = 1

#: Name of the rows of the bare MPI library.
REFERENCE = "mpi"
#: The communicator that is taken where it cannot be told from the fastest: it chooses
#: by itself, also on the next machine.
DEFAULT = "auto"
#: Loads up to so many bytes are about latency.
SMALL_BYTES = 64 * 1024


def _reduced_twice(size: int) -> float:
    return 2 * (size - 1) / size


def _all_but_own(size: int) -> float:
    return (size - 1) / size


#: Operation -> what algbw is multiplied by to give busbw: the part of the bytes that a
#: link has to carry at least, so that figures of several numbers of ranks compare.
#: Source: the performance notes of NVIDIA's nccl-tests.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce_arrays": _reduced_twice,
    "allreduce": _reduced_twice,
    "bcast": lambda size: 1.0,
    "allgather": _all_but_own,
    "reduce_scatter": _all_but_own,
    "alltoall": _all_but_own,
}


@dataclass(frozen=True)
class Row:
    """One communicator with one load; the keys of the file's rows.

    Attributes:
        communicator: a name of the registry, or ``"mpi"``.
        operation: one of :data:`BUS_FACTORS`.
        dtype: name of the arrays' dtype.
        nbytes: bytes of the arrays.
        n_arrays: number of arrays.
        options: those given to ``create_communicator``.
        wire_dtype: name of the dtype in which they travel; ``None``: their own.
        load: name of a gradient set; ``None``: one array.
        times_s: seconds of each repetition on its slowest rank.
        skipped: why there are no times.
    """

    communicator: str
    operation: str
    dtype: str
    nbytes: int
    n_arrays: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    wire_dtype: str | None = None
    load: str | None = None
    times_s: Sequence[float] = ()
    skipped: str | None = None

    @property
    def label(self) -> str:
        """The communicator with its options: ``"multi_ring n_chunks=8"``."""
        options = [f"{k}={_short(v)}" for k, v in self.options.items()]
        return " ".join([self.communicator, *options])

    @property
    def time_s(self) -> float:
        """Median of the repetitions."""
        return statistics.median(self.times_s)

    @property
    def algbw_gb_s(self) -> float:
        """Bytes of the arrays by time, in 1e9 bytes a second."""
        return self.nbytes / self.time_s / 1e9

    def busbw_gb_s(self, size: int) -> float:
        """``algbw`` times what the operation needs of a link, for ``size`` ranks."""
        return self.algbw_gb_s * BUS_FACTORS[self.operation](size)


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return str(value)


@dataclass(frozen=True)
class Results:
    """A whole measurement; the keys of the file.

    Attributes:
        date: when it began, ISO 8601 with the zone.
        machine: where; see the module.
        settings: how often was measured.
        rows: what was found.
        same_way: the communicators in the rows, but ``dummy``, all reduce these arrays
            in the same way.
    """

    date: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    same_way: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.machine["ranks"])

    @property
    def recommended(self) -> str | None:
        """The line for one's script that makes the best communicator."""
        row = self.recommended_row
        return None if row is None else script_line(row)

    @property
    def recommended_row(self) -> Row | None:
        """The row whose communicator is recommended; ``None``: nothing was measured.

        The best one's, or that of ``auto`` where the two are not told apart: all names
        do the same, or ``auto`` was once as fast as the best one's median, at all
        loads. Where all do the same, ``auto`` need not have been measured.
        """
        best = best_row(self.rows)
        if best is None:
            return None
        found = _default_row(self.rows, best)
        if self.same_way:
            return found or replace(best, communicator=DEFAULT, options={})
        return best if found is None or not _reaches(self.rows, found, best) else found


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return a row of the best communicator; ``None`` if nothing was measured.

    With one load that is the fastest one. With several, the one whose times are the
    least multiples of the fastest at each load (the geometric mean); it must have been
    measured at all loads. The bare MPI library cannot be chosen, and does not count.
    """
    ranking = _ranking(rows)
    if not ranking:
        return None
    best, _ = ranking[0]
    return next(row for row in rows if row.times_s and row.label == best)


def _default_row(rows: Sequence[Row], best: Row) -> Row | None:
    """Return a row of the best ``auto``; ``None`` if it was not measured throughout."""
    if best.communicator == DEFAULT:
        return best
    labels = [label for label, _ in _ranking(rows)]
    own = [r for r in rows if r.communicator == DEFAULT and r.times_s]
    return min(
        (row for row in own if row.label in labels),
        key=lambda row: labels.index(row.label),
        default=None,
    )


def _reaches(rows: Sequence[Row], row: Row, best: Row) -> bool:
    """Return whether ``row``'s shortest times are not above ``best``'s medians."""
    medians = {_load_of(r): r.time_s for r in rows if r.label == best.label}
    own = [r for r in rows if r.label == row.label and r.times_s]
    return all(min(r.times_s) <= medians[_load_of(r)] for r in own)


def fast_mpi_loads(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the bare MPI library that beat all of ours, of small loads.

    Small: :data:`SMALL_BYTES` at most, where a call of ours is mostly the agreement of
    the ranks.
    """
    found = []
    for row in rows:
        if row.communicator != REFERENCE or not row.times_s:
            continue
        ours = [
            r.time_s
            for r in rows
            if r.communicator != REFERENCE
            and r.times_s
            and _load_of(r) == _load_of(row)
        ]
        if row.nbytes <= SMALL_BYTES and ours and row.time_s < min(ours):
            found.append(row)
    return found


def _load_of(row: Row) -> tuple[str | None, int]:
    return row.load, row.nbytes


def nearly_best(rows: Sequence[Row], within: float = 0.05) -> list[str]:
    """Return the labels of those that are not told apart from :func:`best_row`'s.

    Args:
        rows: of a measurement.
        within: how much slower they are at most, as a part of the best one's time.
    """
    ranking = _ranking(rows)
    limit = ranking[0][1] + math.log1p(within) if ranking else 0.0
    return [label for label, log in ranking[1:] if log <= limit]


def _ranking(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Return labels and mean logarithms of their ratios to the fastest, best first."""
    by_load: dict[Any, list[Row]] = {}
    for row in rows:
        if row.communicator != REFERENCE and row.times_s:
            by_load.setdefault(_load_of(row), []).append(row)
    logs: dict[str, list[float]] = {}
    for same_load in by_load.values():
        fastest = min(row.time_s for row in same_load)
        for row in same_load:
            logs.setdefault(row.label, []).append(_log_ratio(row.time_s, fastest))
    means = [
        (label, sum(found) / len(found))
        for label, found in logs.items()
        if len(found) == len(by_load)
    ]
    return sorted(means, key=lambda item: item[1])


def _log_ratio(time_s: float, fastest_s: float) -> float:
    if fastest_s <= 0.0:  # a clock too coarse for the operation
        return 0.0 if time_s <= 0.0 else math.inf
    return math.log(time_s / fastest_s)


def script_line(row: Row) -> str:
    """Return the line of Python that makes the communicator of a row."""
    options = {**row.options}
    if row.wire_dtype is not None:
        options["allreduce_grad_dtype"] = row.wire_dtype
    arguments = [
        _source(row.communicator),
        *(f"{key}={_source(value)}" for key, value in options.items()),
    ]
    return f"comm = chainermn_ng.create_communicator({', '.join(arguments)})"


def _source(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return repr(tuple(value))
    return repr(value)


def write_results(path: str | os.PathLike[str], results: Results) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        **asdict(results),
        "recommended": results.recommended,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or of another version; the text says which.
    """
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{os.fspath(path)}: not written by chainermn-ng bench --json")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{os.fspath(path)}: version {content.get('version')!r} of the file; this "
            f"chainermn-ng reads version {VERSION}"
        )
    try:
        return Results(
            content["date"],
            content["machine"],
            content["settings"],
            [_read_row(row) for row in content["rows"]],
            bool(content.get("same_way", False)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{os.fspath(path)}: incomplete ({type(error).__name__}: {error})"
        ) from error


def _read_row(row: Mapping[str, Any]) -> Row:
    known = Row.__dataclass_fields__
    values = {key: value for key, value in row.items() if key in known}
    values["options"] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in row["options"].items()
    }
    values["times_s"] = tuple(row["times_s"])
    return Row(**values)
