"""The results as markdown, and the place for it in the documents."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.results import Row, Table

BEGIN = "<!-- figures begin -->"
END = "<!-- figures end -->"
HEADINGS = ["what", "measured", "against", "ratio", "goal", ""]


def markdown(
    machine: Mapping[str, str], rows: Sequence[Row], tables: Sequence[Table]
) -> str:
    """Return the machine, the comparison with its notes, and the scaling tables."""
    described = "; ".join(f"{name} {text}" for name, text in machine.items())
    parts = [f"{described}."]
    if rows:
        parts.append(_table(HEADINGS, [_cells(row) for row in rows]))
        parts += [f"- `{row.key}`: {note}" for row in rows for note in row.notes]
    for table in tables:
        parts.append(f"### {table.title}")
        if table.skipped is not None:
            parts.append(_verdict(table))
        else:
            parts.append(_table(table.columns, table.lines))
        parts += [f"- {note}" for note in table.notes]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("|\n- ", "|\n\n- ")


def _cells(row: Row) -> list[str]:
    against = row.against
    if row.peers:
        against += f": {', '.join(row.peers)}"
    if row.ratio is None:
        ratio = "-"
    else:
        ratio = f"**{row.ratio:.2f}**"
        if row.spread is not None:
            ratio += f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})"
    return [
        f"`{row.key}` {row.what}",
        row.ours or "-",
        against,
        ratio,
        f"{row.goal:.2f}",
        _verdict(row),
    ]


def _verdict(result: Row | Table) -> str:
    if result.failed:
        return f"failed: {_one_line(result.skipped)}"
    if result.skipped is not None:
        return f"skipped: {_one_line(result.skipped)}"
    return "met" if isinstance(result, Row) and result.is_met else "not met"


def _one_line(text: str | None, limit: int = 200) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *map(line, lines)])


def put_between_markers(page: str, figures: str) -> str:
    """Return the page's text with ``figures`` in place of what the markers enclose.

    Raises:
        ValueError: the page has not exactly one pair of markers.
    """
    before, found_begin, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end or BEGIN in rest or END in after:
        raise ValueError(f"expected one {BEGIN} and, after it, one {END}")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def write_into(path: pathlib.Path, figures: str) -> None:
    """Put the figures between the markers of a page, which must have them."""
    path.write_text(put_between_markers(path.read_text(), figures))
