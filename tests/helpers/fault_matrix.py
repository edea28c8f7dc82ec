"""The table of what fails, where, and what the job made of it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Filled by the tests, printed at their end.
ROWS: list[Row] = []

_HEAD = (
    "fails",
    "where",
    "status",
    "seconds",
    "rank 0 showed",
    "rank 1 showed",
    "mpiexec showed",
)
_LONGEST_ON_SCREEN = 110
_LONGEST_IN_FILE = 500


@dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        what: what fails on rank 1.
        where: in which part of the program.
        status: of the job.
        seconds: from the failure to the end of the job.
        shown: by each rank, and by mpiexec, the one line that tells most.
    """

    what: str
    where: str
    status: int
    seconds: float
    shown: Sequence[str] = field(default_factory=list)


def telling_line(output: str) -> str:
    """Return the line of a rank's output that says why it ended; or a dash."""
    lines = [line.strip() for line in output.splitlines()]
    for start in ("chainermn_ng: rank", "chainermn_ng:", "trained to"):
        found = [line for line in lines if line.startswith(start)]
        if found:
            return found[-1]
    # The last line of a traceback that was cut off by the end of the job.
    found = [line for line in lines if "Error: " in line or "Exception in" in line]
    return found[-1] if found else "-"


def telling_line_of_mpiexec(output: str) -> str:
    """Return the line in which MPICH's mpiexec names a signal; or a dash."""
    found = [line for line in output.splitlines() if "EXIT STRING:" in line]
    return found[-1].partition("EXIT STRING:")[2].strip() if found else "-"


def markdown(rows: Sequence[Row], longest: int = _LONGEST_ON_SCREEN) -> str:
    """Return the table, with texts of no more than ``longest`` characters."""
    lines = [_HEAD, ("---",) * len(_HEAD)]
    for row in sorted(rows, key=lambda row: (row.where, row.what)):
        shown = [_short(text, longest) for text in row.shown]
        status, seconds = str(row.status), f"{row.seconds:.1f}"
        lines.append((row.what, row.where, status, seconds, *shown))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Write the table to a file of its own."""
    path.parent.mkdir(exist_ok=True)
    title = "# What a failing rank does to a job of two ranks\n\n"
    path.write_text(title + markdown(rows, _LONGEST_IN_FILE))


def _short(text: str, longest: int) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= longest else text[: longest - 3] + "..."
