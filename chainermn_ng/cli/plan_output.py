"""Tables and plots of predictions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from chainermn_ng.cli.bench_table import format_time
from chainermn_ng.cli.predictions import Load, Prediction
from chainermn_ng.cli.quantities import format_rate
from communicators.byte_sizes import format_bytes
from communicators.cost_fit import Fit
from communicators.cost_model import Cluster
from communicators.cost_search import Training

#: A fit that misses its own rows by more than this is told to be poor.
POOR_RESIDUAL = 0.2

_TITLES = {
    "intra_latency_s": "latency in a host",
    "intra_bytes_s": "bandwidth in a host",
    "inter_latency_s": "latency between hosts",
    "inter_bytes_s": "bandwidth between hosts",
}


def new_console() -> Console:
    """Return a console that is wide enough for tables where there is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def show(
    cluster: Cluster,
    load: Load,
    training: Training | None,
    fit: Fit | None,
    rounds: Sequence[Sequence[Prediction]],
    line: str,
) -> None:
    """Print what was predicted.

    Args:
        cluster: where.
        load: what is reduced.
        training: what a step is besides.
        fit: where the constants come from, if they were fitted.
        rounds: predictions by number of ranks, each the best first.
        line: the line to put into one's script.
    """
    console = new_console()
    if fit is not None:
        _show_fit(console, fit)
    console.print(_describe(cluster, load))
    console.print(_whole_cluster(rounds[-1], load))
    if len(rounds) > 1:
        console.print(_by_ranks(rounds, training is not None))
    console.print("Recommended:")
    # Not wrapped: it is to be copied.
    click.echo(f"  {line}")


def _describe(cluster: Cluster, load: Load) -> str:
    c = cluster
    parts = [f"{c.hosts} x {c.ranks_per_host} ranks"]
    if c.ranks_per_host > 1:
        how = "common memory, " if c.shared_memory else ""
        parts.append(
            f"in a host {how}{format_rate(c.intra_bytes_s)}, "
            f"{format_time(c.intra_latency_s)}"
        )
    if c.hosts > 1:
        cards = f"{c.nics} x " if c.nics > 1 else ""
        parts.append(
            f"between hosts {cards}{format_rate(c.inter_bytes_s)}, "
            f"{format_time(c.inter_latency_s)}"
        )
    nbytes = format_bytes(round(load.nbytes))
    return f"{load.name}: {nbytes} on the wire; {'; '.join(parts)}"


def _show_fit(console: Console, fit: Fit) -> None:
    table = Table(title="Fitted constants", title_justify="left")
    for column in ("constant", "value", "+-"):
        table.add_column(column, justify="left" if column == "constant" else "right")
    for name in fit.fitted:
        value = getattr(fit.cluster, name)
        text = format_rate if name.endswith("bytes_s") else format_time
        table.add_row(_TITLES[name], text(value), f"{fit.uncertainty[name]:.0%}")
    console.print(table)
    worst = fit.worst
    row = f"{worst.name} of {format_bytes(round(worst.nbytes))}"
    console.print(
        f"Residual {fit.residual:.1%} (root mean square of predicted / measured - 1); "
        f"worst {fit.worst_error:+.1%}: {row} on {worst.hosts}x{worst.ranks_per_host}"
    )
    if fit.residual > POOR_RESIDUAL:
        console.print(
            "The model does not describe these rows well: measure again on quiet "
            "machines, with more repetitions, before you trust what follows"
        )


def _whole_cluster(predictions: Sequence[Prediction], load: Load) -> Table:
    table = Table(
        title=f"Predicted on {predictions[0].n_ranks} ranks", title_justify="left"
    )
    table.add_column("communicator")
    table.add_column("dims")
    columns = ["pieces", "all-reduce"]
    if predictions[0].step_s is not None:
        columns += ["step", "efficiency"]
    for column in columns:
        table.add_column(column, justify="right")
    for p in predictions:
        dims = "x".join(map(str, p.choice.dims or ()))
        cells = [p.choice.name, dims, _pieces(p, load), format_time(p.choice.seconds)]
        if p.step_s is not None:
            cells += [format_time(p.step_s), f"{p.efficiency:.1%}"]
        table.add_row(*cells)
    return table


def _pieces(prediction: Prediction, load: Load) -> str:
    choice = prediction.choice
    if choice.name == "naive":
        return f"{load.n_arrays} array{'s' * (load.n_arrays > 1)}"
    return f"{choice.n_pieces} x {format_bytes(choice.piece_bytes(load.nbytes))}"


def _by_ranks(rounds: Sequence[Sequence[Prediction]], is_training: bool) -> Table:
    what = "Efficiency and all-reduce" if is_training else "All-reduce"
    table = Table(title=f"{what} by ranks", title_justify="left")
    table.add_column("ranks", justify="right")
    table.add_column("hosts", justify="right")
    names = [p.choice.name for p in rounds[-1]]
    for name in names:
        table.add_column(name, justify="right")
    for predictions in rounds:
        by_name = {p.choice.name: p for p in predictions}
        first = predictions[0]
        cells = [_cell(by_name[name]) for name in names]
        table.add_row(str(first.n_ranks), str(first.hosts), *cells)
    return table


def _cell(prediction: Prediction) -> str:
    seconds = format_time(prediction.choice.seconds)
    if prediction.efficiency is None:
        return seconds
    return f"{prediction.efficiency:.1%}\n{seconds}"


def plot(path: str, rounds: Sequence[Sequence[Prediction]], title: str) -> None:
    """Draw all-reduce times, and efficiency where it is known, by number of ranks.

    Args:
        path: of the picture; its ending says the format.
        rounds: as for :func:`show`.
        title: of the picture.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_efficiency = rounds[0][0].efficiency is not None
    figure = Figure(figsize=(11 if has_efficiency else 6, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    n_axes = 2 if has_efficiency else 1
    axes = list(figure.subplots(1, n_axes, squeeze=False)[0])
    travelling = [predictions for predictions in rounds if predictions[0].n_ranks > 1]
    _draw(axes[0], travelling, lambda p: p.choice.seconds * 1e3)
    axes[0].set_ylabel("all-reduce, ms")
    axes[0].set_yscale("log")
    if has_efficiency:
        _draw(axes[1], rounds, lambda p: 100 * p.efficiency)
        axes[1].set_ylabel("parallel efficiency, %")
        axes[1].set_ylim(0, 105)
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path)


def _draw(axis: Any, rounds: Sequence[Sequence[Prediction]], value: Any) -> None:
    if not rounds:
        return
    for name in [p.choice.name for p in rounds[-1]]:
        points = [
            (p.n_ranks, value(p))
            for predictions in rounds
            for p in predictions
            if p.choice.name == name
        ]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    ranks = [predictions[0].n_ranks for predictions in rounds]
    axis.set_xticks(ranks, [str(n) for n in ranks])
    axis.set_xlabel("ranks")
    axis.grid(alpha=0.3)
