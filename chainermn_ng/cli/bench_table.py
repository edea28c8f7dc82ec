"""The results of a bench as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from communicators.bench_results import (
    Results,
    Row,
    best_row,
    fast_mpi_loads,
    nearly_best,
)
from communicators.byte_sizes import format_bytes

COLUMNS = (
    *("load", "bytes", "dtype", "communicator"),
    *("time", "min", "max", "algbw", "busbw"),
)
_LEFT = ("load", "dtype", "communicator")
NOTE = (
    "time: median of the repetitions, each as long as on its slowest rank; "
    "algbw, busbw: GB/s, 1 GB = 1e9 bytes"
)
SAME_WAY = (
    "on this host all names reduce gradients in the same way, what is between them is "
    "chance:"
)


def format_time(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.{_n_decimals(seconds / factor)}f} {unit}"
    return f"{seconds * 1e6:.{_n_decimals(seconds * 1e6)}f} us"


def count(n: int, thing: str) -> str:
    """Return ``"1 rank"`` or ``"2 ranks"``."""
    return f"{n} {thing}{'' if n == 1 else 's'}"


def _n_decimals(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0


def _format_rate(gb_s: float) -> str:
    return f"{gb_s:.3f}"


def cells_of(row: Row, size: int) -> list[str]:
    """Return the cells of a row in the order of :data:`COLUMNS`; fewer if skipped."""
    dtype = row.dtype
    if row.wire_dtype not in (None, row.dtype):
        dtype = f"{row.dtype} as {row.wire_dtype}"
    load = row.load or format_bytes(row.nbytes)
    cells = [load, str(row.nbytes), dtype, row.label]
    if row.skipped is not None:
        return [*cells, f"skipped: {row.skipped}"]
    times = (row.time_s, min(row.times_s), max(row.times_s))
    rates = (row.algbw_gb_s, row.busbw_gb_s(size))
    return [*cells, *map(format_time, times), *map(_format_rate, rates)]


def plain_table(results: Results) -> str:
    """Return the table as text for files and pipes."""
    rows = [cells_of(row, results.size) for row in results.rows]
    whole = [list(COLUMNS), *(row for row in rows if len(row) == len(COLUMNS))]
    # A reason why a row was skipped may be long, and moves no column.
    n_first = COLUMNS.index("time")
    whole += [row[:n_first] for row in rows]
    widths = [
        max(len(row[i]) for row in whole if i < len(row)) for i in range(len(COLUMNS))
    ]
    lines = []
    for row in (list(COLUMNS), ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(widths[i]) if COLUMNS[i] in _LEFT else cell.rjust(widths[i])
            for i, cell in enumerate(row[:n_first] if len(row) <= n_first + 1 else row)
        ]
        if len(row) == n_first + 1:
            cells.append(row[-1])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def rich_table(results: Results) -> Table:
    """Return the table for terminals."""
    table = Table()
    for name in COLUMNS:
        justify: JustifyMethod = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    before: object = None
    for row in results.rows:
        load = (row.load, row.nbytes)
        if before not in (None, load):
            table.add_section()
        before = load
        cells = cells_of(row, results.size)
        # Reasons may be long: they follow below.
        table.add_row(*(cells if row.skipped is None else [*cells[:-1], "skipped"]))
    return table


def reason_lines(results: Results) -> list[str]:
    """Return why communicators were skipped, each reason once."""
    reasons = [f"{r.label}: skipped: {r.skipped}" for r in results.rows if r.skipped]
    return list(dict.fromkeys(reasons))


def header_lines(results: Results) -> list[str]:
    """Return what to know of the machine, a line each."""
    machine = results.machine
    hosts: dict[str, int] = {}
    for host in machine["hosts"]:
        text = f"{count(host['ranks'], 'rank')} on {count(host['cores'], 'core')}"
        hosts[text] = hosts.get(text, 0) + 1
    layout = "; ".join(f"{n} x {text}" for text, n in hosts.items())
    pretended = " (pretended)" if machine.get("is_pretended") else ""
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
    return [
        f"{count(results.size, 'rank')}, topology {machine['topology']}{pretended}, "
        f"hosts: {layout}, arrays: {machine['device']}",
        f"{' '.join(machine['mpi'].split())}, Python {machine['python']}, {packages}",
        f"{results.rows[0].operation}, {results.date}"
        if results.rows
        else results.date,
    ]


def mpi_lines(results: Results) -> list[str]:
    """Return where the bare MPI library is faster, and why, if that is so."""
    rows = fast_mpi_loads(results.rows)
    if not rows:
        return []
    loads = ", ".join(dict.fromkeys(r.load or format_bytes(r.nbytes) for r in rows))
    return [
        f"mpi is faster at {loads}: each call of ours first lets the ranks agree on "
        "what they are about to do"
    ]


def footer_lines(results: Results) -> list[str]:
    """Return the recommendation, or that there is none."""
    best, chosen = best_row(results.rows), results.recommended_row
    if best is None or chosen is None:
        return ["no communicator was measured"]
    n_loads = len({(row.load, row.nbytes) for row in results.rows})
    fastest = "the fastest" if n_loads == 1 else "the fastest over all loads"
    others = [name for name in nearly_best(results.rows) if name != chosen.label]
    if results.same_way:
        why, others = SAME_WAY, []
    elif chosen.label == best.label:
        why = f"{fastest} here:"
    else:
        why = f"{fastest} here is {best.label}, which {chosen.label} is not told from:"
        others.insert(0, best.label)
    lines = [why, "", f"    {results.recommended}", ""]
    if others:
        lines.append(f"(not more than 5 % slower: {', '.join(others)})")
    return lines


def print_results(results: Results, console: Console) -> None:
    """Print machine, table and recommendation."""
    table = rich_table(results)
    lines: list[str] = header_lines(results)
    unlimited = console.options.update(max_width=10_000)
    width = console.measure(table, options=unlimited).maximum
    if console.is_terminal and width <= console.width:
        _write(console, lines)
        console.print(table)
        lines = [NOTE, *reason_lines(results)]
    else:
        lines += ["", plain_table(results), "", NOTE]
    _write(console, [*lines, *mpi_lines(results), *footer_lines(results)])


def _write(console: Console, lines: Sequence[str]) -> None:
    """Write lines as they are: a terminal may break them, but a copy is whole."""
    console.file.write("\n".join(lines) + "\n")
    console.file.flush()
