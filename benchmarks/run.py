"""Measure this project beside its peers, and print one table.

    python -m benchmarks.run                       everything
    python -m benchmarks.run --only one-host --quick

Rows that this machine cannot run are skipped and say why. The exit status is 1 when a
row failed; a goal that is not met is a figure, not a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from communicators import UnavailableError
from communicators.bench_candidates import choose_candidates, parse_candidate
from communicators.bench_results import REFERENCE

from benchmarks.machine import REPOSITORY, describe
from benchmarks.report import markdown, write_into
from benchmarks.results import BenchmarkError, NotHere, Row, Table
from benchmarks.rows import COMPARISONS, SCALINGS
from benchmarks.settings import Settings

PAGE = REPOSITORY / "docs" / "source" / "benchmarks.md"
KEYS = [*COMPARISONS, *SCALINGS]


def measure(
    result: Row | Table, fill: Callable[[Any, Settings], None], settings: Settings
) -> None:
    """Fill a row or table; note why where that is impossible or fails."""
    start = time.monotonic()
    print(f"{result.key} ...", end=" ", file=sys.stderr, flush=True)
    try:
        fill(result, settings)
    except NotHere as reason:
        result.skipped = str(reason)
    except BenchmarkError as error:
        result.skipped, result.failed = str(error), True
        print(f"\n{error}", file=sys.stderr)
    except Exception:
        # What the other rows measured is not lost for it.
        result.skipped, result.failed = traceback.format_exc(limit=-1), True
        traceback.print_exc()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def measure_all(
    keys: Sequence[str], settings: Settings
) -> tuple[list[Row], list[Table]]:
    """Measure what the keys name, in the table's order."""
    rows, tables = [], []
    for key in keys:
        if key in COMPARISONS:
            about = COMPARISONS[key]
            row = Row(key, about.what, about.against, about.goal)
            measure(row, about.measure, settings)
            rows.append(row)
        else:
            kind = SCALINGS[key]
            table = Table(key, kind.title, list(kind.columns))
            measure(table, kind.measure, settings)
            tables.append(table)
    return rows, tables


def chosen(prefixes: Sequence[str]) -> list[str]:
    """Return the keys that begin with one of the prefixes; all of them without any.

    Raises:
        ValueError: a prefix fits no key.
    """
    for prefix in prefixes:
        if not any(key.startswith(prefix) for key in KEYS):
            raise ValueError(f"no row {prefix!r}; known: {', '.join(KEYS)}")
    return [key for key in KEYS if not prefixes or key.startswith(tuple(prefixes))]


def check_communicators(texts: Sequence[str]) -> None:
    """Refuse communicators that there are not, before anything is measured.

    Raises:
        ValueError: an unknown name or option, or a malformed text.
        UnavailableError: it cannot be imported here.
    """
    for text in texts:
        if parse_candidate(text).name == REFERENCE:
            raise ValueError(f"--communicator {text}: MPI's own always takes part")
    if texts:
        choose_candidates(texts)


def parse(args: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return it and the keys of the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="ROW", help=", ".join(KEYS))
    add("--quick", action="store_true", help="few repetitions; no figures to keep")
    add("--rounds", type=int, default=21, help="of each contender, in all")
    add("--without-torch", action="store_true")
    add(
        "--communicator",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="of ours, what competes (default: all that can)",
    )
    add("--json", type=pathlib.Path, metavar="FILE", help="write every repetition")
    add("--write-docs", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args(args)
    if options.write_docs and (options.only or options.quick):
        parser.error("--write-docs needs a whole run: no --only, no --quick")
    try:
        check_communicators(options.communicator)
        return options, chosen(options.only)
    except (UnavailableError, ValueError) as error:
        parser.error(str(error))


def main(args: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for."""
    options, keys = parse(args)
    # Ends the jobs and removes the virtual hosts, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    settings = Settings(
        is_quick=options.quick,
        rounds=min(4, options.rounds) if options.quick else options.rounds,
        blocks=1 if options.quick else 3,
        communicators=tuple(options.communicator),
        without_torch=options.without_torch,
    )
    machine = describe()
    rows, tables = measure_all(keys, settings)
    figures = markdown(machine, rows, tables)
    print(figures)
    if options.json is not None:
        everything = {
            "machine": machine,
            "rows": [dataclasses.asdict(row) for row in rows],
            "tables": [dataclasses.asdict(table) for table in tables],
        }
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    if options.write_docs:
        write_into(PAGE, figures)
    return int(any(row.failed for row in rows) or any(table.failed for table in tables))


if __name__ == "__main__":
    sys.exit(main())
