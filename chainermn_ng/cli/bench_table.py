"""The results of a bench as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from communicators.bench_results import Results, Row, nearly_best
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


def format_time(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.{_n_decimals(seconds / factor)}f} {unit}"
    return f"{seconds * 1e6:.{_n_decimals(seconds * 1e6)}f} us"


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
    table = Table(caption=NOTE)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    before: object = None
    for row in results.rows:
        load = (row.load, row.nbytes)
        if before not in (None, load):
            table.add_section()
        before = load
        table.add_row(*cells_of(row, results.size))
    return table


def header_lines(results: Results) -> list[str]:
    """Return what to know of the machine, a line each."""
    machine = results.machine
    hosts: dict[str, int] = {}
    for host in machine["hosts"]:
        text = f"{host['ranks']} ranks on {host['cores']} cores"
        hosts[text] = hosts.get(text, 0) + 1
    layout = "; ".join(f"{n} x {text}" for text, n in hosts.items())
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
    return [
        f"{results.size} ranks, topology {machine['topology']}, hosts: {layout}, "
        f"arrays: {machine['device']}",
        f"{' '.join(machine['mpi'].split())}, Python {machine['python']}, {packages}",
        f"{results.rows[0].operation}, {results.date}"
        if results.rows
        else results.date,
    ]


def footer_lines(results: Results) -> list[str]:
    """Return the recommendation, or that there is none."""
    if results.recommended is None:
        return ["no communicator was measured"]
    n_loads = len({(row.load, row.nbytes) for row in results.rows})
    why = "the fastest" if n_loads == 1 else "the fastest over all loads"
    lines = [f"{why} here:", "", f"    {results.recommended}", ""]
    others = nearly_best(results.rows)
    if others:
        lines.insert(1, f"(not more than 5 % slower: {', '.join(others)})")
    return lines


def print_results(results: Results, console: Console) -> None:
    """Print machine, table and recommendation."""
    if console.is_terminal:
        for line in header_lines(results):
            console.print(line, highlight=False, markup=False)
        console.print(rich_table(results))
        for line in footer_lines(results):
            console.print(line, markup=False, soft_wrap=True)
        return
    parts: Sequence[str] = (
        *header_lines(results),
        "",
        plain_table(results),
        "",
        NOTE,
        *footer_lines(results),
    )
    console.file.write("\n".join(parts) + "\n")
    console.file.flush()
