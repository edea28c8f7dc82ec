"""How far a bench is, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

MODES = ("auto", "bar", "lines", "off")
#: Between two lines where there is no terminal.
_LINE_EVERY_S = 5.0

#: Told the part that is done, 0 to 1, and what comes next.
Report = Callable[[float, str], object]


@contextlib.contextmanager
def progress_of(mode: str) -> Iterator[Report | None]:
    """Show progress for the time of a ``with`` block.

    Args:
        mode: ``"bar"`` draws one also where mpiexec stands between this process and
            the terminal; ``"lines"`` writes a line now and then; ``"auto"`` is a bar
            on a terminal, else lines.
    """
    console = Console(stderr=True, force_terminal=True if mode == "bar" else None)
    if mode == "off":
        yield None
    elif mode == "lines" or (mode == "auto" and not console.is_terminal):
        yield _lines()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda part, text: bar.update(task, completed=part, description=text)


def _lines() -> Report:
    begun = last = time.monotonic()

    def report(part: float, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S:
            last = now
            print(
                f"bench: {100 * part:.0f} % done after {now - begun:.0f} s, at {text}",
                file=sys.stderr,
                flush=True,
            )

    return report
