"""The results of a bench as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod
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
    _write(console, [*lines, *footer_lines(results)])


def _write(console: Console, lines: Sequence[str]) -> None:
    """Write lines as they are: a terminal may break them, but a copy is whole."""
    console.file.write("\n".join(lines) + "\n")
    console.file.flush()
