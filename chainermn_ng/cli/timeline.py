"""``chainermn-ng timeline``: a table and one trace of recorded training steps."""

from __future__ import annotations

import os
import statistics
from typing import Any

import click
from rich.table import Table

from chainermn_ng.cli.bench_table import format_time
from chainermn_ng.cli.inputs import BadInput, check_folder
from chainermn_ng.cli.plan_output import new_console
from chainermn_ng.timeline.summary import Summary, summarise
from chainermn_ng.timeline.trace_files import (
    Trace,
    TraceError,
    merge_traces,
    read_trace,
    write_trace,
)

MERGED = "timeline-merged.json.gz"
#: More ranks than this are shown by the least, the median and the most of them.
MAX_COLUMNS = 8
#: A rank has so many times the work of the others at least if they wait for it.
SLOWER = 1.02


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option(
    *("--output", "-o"),
    type=click.Path(dir_okay=False),
    help="Write one trace of all files here; compressed if it ends in .gz. "
    f"[default: with several files {MERGED}]",
)
def timeline(files: tuple[str, ...], output: str | None) -> None:
    """Turn recorded training steps into a table and one trace.

    FILES are what extensions.Timeline has written: one of all ranks, or one a rank.

    Each number is the median over the recorded steps. "exposed" is the time in which a
    rank communicated and did nothing else; a phase that overlaps itself, such as
    flights of several buckets, counts once.
    """
    if output is None and len(files) > 1:
        output = MERGED
    if output is not None:
        _check_output(output, files)
    traces = [_read(path) for path in files]
    try:
        trace = merge_traces(traces)
    except TraceError as error:
        raise BadInput(f"the files do not belong together: {error}") from None
    _show(trace, summarise(trace))
    if output is not None:
        _write(output, trace)


def _read(path: str) -> Trace:
    try:
        return read_trace(path)
    except (OSError, TraceError) as error:
        raise BadInput(str(error)) from None


def _check_output(output: str, files: tuple[str, ...]) -> None:
    """Refuse what cannot be written, before anything is shown."""
    try:
        check_folder("--output", output)
    except ValueError as error:
        raise BadInput(str(error)) from None
    there = [path for path in files if os.path.exists(path)]
    if os.path.exists(output) and any(os.path.samefile(output, f) for f in there):
        raise BadInput(f"--output {output} is one of the files to read")


def _write(output: str, trace: Trace) -> None:
    try:
        write_trace(output, trace)
    except OSError as error:
        raise click.ClickException(f"--output: {error}") from None
    click.echo(f"Written: {output} (load it in https://ui.perfetto.dev)")


def _show(trace: Trace, summary: Summary) -> None:
    header = trace.header
    console = new_console()
    title = (
        f"{header.communicator} on {header.topology}, {len(header.steps)} steps "
        f"({_ranges(header.steps)}): medians"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("phase")
    are_few = len(summary.ranks) <= MAX_COLUMNS
    headings = [f"rank {rank.rank}" for rank in summary.ranks]
    for heading in headings if are_few else ("least", "median", "most"):
        table.add_column(heading, justify="right")
    for name, values in _lines(summary):
        cells = [_cell(value) for value in values] if are_few else _spread(values)
        table.add_row(name, *cells)
    console.print(table)
    for line in _remarks(trace, summary):
        click.echo(line)


def _lines(summary: Summary) -> list[tuple[str, list[Any]]]:
    """Return name and value by rank; a float is seconds, a text itself."""
    ranks = summary.ranks
    return [
        *((name, [r.phases_s.get(name) for r in ranks]) for name in summary.phases),
        ("step", [rank.step_s for rank in ranks]),
        ("exposed", [rank.exposed_s for rank in ranks]),
        ("buckets", [f"{rank.n_flights:g}" for rank in ranks]),
    ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format_time(value)


def _spread(values: list[Any]) -> list[str]:
    known = [value for value in values if value is not None]
    if isinstance(known[0], str):
        known.sort(key=float)
        return [known[0], known[len(known) // 2], known[-1]]
    middle = statistics.median(known)
    return [format_time(value) for value in (min(known), middle, max(known))]


def _remarks(trace: Trace, summary: Summary) -> list[str]:
    header, ranks = trace.header, summary.ranks
    step_s = statistics.median(rank.step_s for rank in ranks)
    exposed_s = statistics.median(rank.exposed_s for rank in ranks)
    lines = []
    if step_s > 0:
        lines.append(
            f"Exposed communication: {format_time(exposed_s)} of a step of "
            f"{format_time(step_s)} ({exposed_s / step_s:.0%}), median of the ranks"
        )
    if len(ranks) > 1:
        slowest = summary.slowest
        others_s = statistics.median(r.work_s for r in ranks if r is not slowest)
        if slowest.work_s > SLOWER * others_s:
            lines.append(
                f"Slowest: rank {slowest.rank} on {slowest.host}, with "
                f"{format_time(slowest.work_s)} of work of its own a step; the others "
                f"have {format_time(others_s)} (median), and wait for it"
            )
        else:
            lines.append(
                "No rank is slower than the others: each has about "
                f"{format_time(others_s)} of work of its own a step"
            )
    missing = sorted(set(range(header.size)) - set(header.ranks))
    if missing:
        lines.append(f"Not here: rank {_ranges(missing)} of {header.size}")
    error_us = max(header.clock_error_us)
    if error_us > 0:
        lines.append(f"Times of different hosts may be off by {error_us:.1f} us")
    return lines


def _ranges(numbers: list[int]) -> str:
    """Return ``"1-3, 7"`` for ``[1, 2, 3, 7]``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
