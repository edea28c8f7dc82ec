"""How a program tells its results to the script that started it: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

_PREFIX = "RESULT "


def tell_row(table: str, *cells: object) -> None:
    """Print a row of one of the tables at the end.

    Args:
        table: name of the table, a key of the script's ``TABLES``.
        cells: one a column.
    """
    _tell(table, [str(cell) for cell in cells])


def tell_detail(text: str) -> None:
    """Print what stands beside the step's verdict."""
    _tell("", [text])


def read(output: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Return the tables' names and rows in a program's output.

    The name is empty for what :func:`tell_detail` printed.
    """
    for line in output.splitlines():
        if line.startswith(_PREFIX):
            name, cells = json.loads(line.removeprefix(_PREFIX))
            yield name, cells


def _tell(table: str, cells: Sequence[str]) -> None:
    # In one piece: the lines of several ranks must not mix. What was printed last may
    # lack its end of line, as progress bars do.
    print(f"\n{_PREFIX}{json.dumps([table, cells])}\n", end="", flush=True)
