"""The results of a bench as a picture."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from communicators.bench_results import Results, Row

SUFFIXES = (".png", ".pdf", ".svg")


def check_plot(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that cannot be made, before anything is measured.

    Raises:
        ValueError: a suffix that names no format of ours, or no matplotlib.
    """
    if pathlib.Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"--plot {os.fspath(path)}: expected a name that ends in "
            f"{', '.join(SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot needs matplotlib; the extra 'cli' brings it: pip install '.[cli]' "
            "in a checkout of chainermn_ng"
        )


def write_plot(path: str | os.PathLike[str], results: Results) -> None:
    """Draw busbw by bytes; for a single load the times as bars.

    Args:
        path: its suffix is the format.
        results: rows that were skipped are left out.

    Raises:
        OSError: the file cannot be written.
    """
    # Without a display, whatever the user's settings say.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in results.rows if row.times_s]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if len({(row.load, row.nbytes) for row in rows}) > 1:
        _draw_lines(axes, rows, results.size)
    else:
        _draw_bars(axes, rows)
    if rows:
        axes.set_title(
            f"{rows[0].operation}, {rows[0].dtype}, {results.size} ranks "
            f"({results.machine['topology']})"
        )
    figure.savefig(path)


def _draw_lines(axes: Any, rows: Sequence[Row], size: int) -> None:
    # On one rank busbw is 0 for most operations, and a logarithm has no place for it.
    is_bus = size > 1
    for label in dict.fromkeys(row.label for row in rows):
        own = sorted((r for r in rows if r.label == label), key=lambda r: r.nbytes)
        rates = [row.busbw_gb_s(size) if is_bus else row.algbw_gb_s for row in own]
        axes.loglog([row.nbytes for row in own], rates, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes")
    axes.set_ylabel(f"{'busbw' if is_bus else 'algbw'}, GB/s")
    axes.grid(True, which="major", alpha=0.4)
    axes.legend()


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    labels = [row.label for row in rows]
    medians = [row.time_s * 1e3 for row in rows]
    spread = [
        [(row.time_s - min(row.times_s)) * 1e3 for row in rows],
        [(max(row.times_s) - row.time_s) * 1e3 for row in rows],
    ]
    axes.barh(labels, medians, xerr=spread, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("ms (median; lines from the least to the most)")
