"""``chainermn-ng bench``: compare communicators on the ranks of this job."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from chainermn_ng import cpu_fallback, global_except_hook
from chainermn_ng.cli import ranks
from chainermn_ng.cli.bench_plot import check_plot, write_plot
from chainermn_ng.cli.bench_progress import MODES, progress_of
from chainermn_ng.cli.bench_table import print_results
from chainermn_ng.cli.inputs import check_folder
from chainermn_ng.devices import choose_device
from communicators import CommunicatorBase, UnavailableError
from communicators.bench import Bench, BenchDevice, Load, Settings
from communicators.bench_candidates import choose_candidates
from communicators.bench_results import BUS_FACTORS, Results, write_results
from communicators.byte_sizes import parse_sizes
from communicators.devices.host import nccl_takes_host_memory
from communicators.gradient_sets import GRADIENT_SETS
from communicators.measuring import Timing

DEFAULT_SIZES = "1KiB:64MiB"
DTYPES = ("float16", "bfloat16", "float32", "float64")


@click.command(cls=ranks.RanksCommand)
@click.option(
    *("--communicator", "-c", "chosen"),
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="A communicator, with options of its own, such as "
    "multi_ring:dims=2x2,n_chunks=8. Repeatable. By default all that work here, but "
    "dummy. The bare MPI library is always measured too, as 'mpi'.",
)
@click.option(
    *("--option", "-o", "options"),
    multiple=True,
    metavar="KEY=VALUE",
    help="An option for each communicator that has it, such as bucket_bytes=1MiB. "
    "Repeatable.",
)
@click.option(
    "--sizes",
    metavar="SIZES",
    help=f"Bytes of one array: a range in steps of 4, such as {DEFAULT_SIZES} (the "
    "default), or a list, such as 64KiB,1MB.",
)
@click.option(
    *("--model", "models"),
    multiple=True,
    type=click.Choice(sorted(GRADIENT_SETS)),
    help="The gradients of a network, many arrays at once, in place of --sizes (or "
    "besides, if both are given). Repeatable.",
)
@click.option(
    "--operation",
    type=click.Choice(list(BUS_FACTORS)),
    default="allreduce_arrays",
    show_default=True,
    help="What is measured. allreduce_arrays takes the mean of arrays, as training "
    "does with gradients.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of the arrays.",
)
@click.option(
    "--allreduce-grad-dtype",
    *("wire_dtype",),
    type=click.Choice(DTYPES),
    help="Of what travels, in allreduce_arrays. By default the arrays' own, and "
    "float32 for half precision.",
)
@click.option(
    "--device",
    "kind",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="NumPy arrays, or CuPy arrays on a GPU of each rank's own.",
)
@click.option("--warm-up", default=3, show_default=True, help="Calls before.")
@click.option(
    "--repetitions", default=20, show_default=True, help="Most calls that count."
)
@click.option(
    "--budget-s",
    default=1.0,
    show_default=True,
    help="About how many seconds a row of the table may take. Slow calls are repeated "
    "less often, but 3 times at least.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False),
    help="Write the results, with all times, to this file.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False),
    help="Draw the results into this file (.png, .pdf, .svg).",
)
@click.option(
    "--progress",
    "progress_mode",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="On standard error: a bar, or a line now and then. 'auto' is a bar on a "
    "terminal. mpiexec hides it: 'bar' draws it all the same.",
)
def bench(**arguments: Any) -> int:
    """Measure communicators on the ranks of this job.

    \b
    mpiexec -n 4 chainermn-ng bench --model resnet50
    mpiexec -n 4 chainermn-ng bench -c flat -c multi_ring:n_chunks=8 --sizes 1MiB:64MiB

    Prints a table, and the line for your script that makes the fastest one. Each
    result is checked once. algbw is bytes / time; busbw is algbw times what the
    operation needs of a link (2 (n-1)/n for all-reduce), so that it can be held
    against the speed of the link, whatever the number of ranks n.
    """
    settings: Settings | None = None
    error: Exception | None = None
    try:
        settings = _settings(arguments)
    except ranks.SHARED_ERRORS as failure:
        error = failure
    global_except_hook.add_hook()
    comm = ranks.meet(error=error)
    assert settings is not None
    with comm:
        results = measure(
            comm,
            settings,
            kind=arguments["kind"],
            json_path=arguments["json_path"],
            plot_path=arguments["plot_path"],
            progress_mode=arguments["progress_mode"],
        )
    if comm.rank == 0:
        print_results(results, Console())
    is_missing = any(row.skipped for row in results.rows)
    return ranks.BAD_INPUT if results.recommended is None and is_missing else 0


def _settings(arguments: dict[str, Any]) -> Settings:
    sizes = arguments["sizes"]
    if sizes is None and not arguments["models"]:
        sizes = DEFAULT_SIZES
    loads = [Load(nbytes=n) for n in (parse_sizes(sizes) if sizes else [])]
    loads += [Load(model=name) for name in dict.fromkeys(arguments["models"])]
    timing = Timing(
        arguments["warm_up"], arguments["repetitions"], arguments["budget_s"]
    )
    return Settings(
        choose_candidates(arguments["chosen"], arguments["options"]),
        loads,
        arguments["operation"],
        arguments["dtype"],
        arguments["wire_dtype"],
        timing,
    )


def measure(
    comm: CommunicatorBase,
    settings: Settings,
    *,
    kind: str = "cpu",
    json_path: str | None = None,
    plot_path: str | None = None,
    progress_mode: str = "off",
) -> Results:
    """Measure, and write the files on rank 0. Collective.

    Raises:
        SystemExit: bad input (2) or a failure (1); on all ranks.
    """
    try:
        _check_files(comm, json_path, plot_path)
        device, settings = _prepare_device(comm, kind, settings)
        whole = Bench(comm, settings, device)
    except ranks.SHARED_ERRORS as error:
        ranks.leave_together(error, ranks.BAD_INPUT)
    try:
        with progress_of(progress_mode if comm.rank == 0 else "off") as progress:
            results = whole.run(progress)
        _write_files(comm, results, json_path, plot_path)
    except ranks.SHARED_ERRORS as error:
        ranks.leave_together(error, ranks.FAILED)
    return results


def _check_files(
    comm: CommunicatorBase, json_path: str | None, plot_path: str | None
) -> None:
    """Refuse files that rank 0 cannot write, before anything is measured."""
    error: Exception | None = None
    if comm.rank == 0:
        try:
            for option, path in (("--json", json_path), ("--plot", plot_path)):
                if path is not None:
                    check_folder(option, path)
            if plot_path is not None:
                check_plot(plot_path)
        except (OSError, ValueError) as failure:
            error = failure
    comm.agree("bench: files", error=error)


def _write_files(
    comm: CommunicatorBase,
    results: Results,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    error: Exception | None = None
    if comm.rank == 0:
        try:
            if json_path is not None:
                write_results(json_path, results)
            if plot_path is not None:
                write_plot(plot_path, results)
        except OSError as failure:
            error = failure
    comm.agree("bench: writing the results", error=error)


def _prepare_device(
    comm: CommunicatorBase, kind: str, settings: Settings
) -> tuple[BenchDevice, Settings]:
    """Choose this rank's device. Collective."""
    if kind == "cpu":
        return BenchDevice(), settings
    if nccl_takes_host_memory():
        return BenchDevice("gpu", text="gpu (emulated on host memory)"), settings
    error: Exception | None = None
    if cpu_fallback.is_active():
        error = UnavailableError(
            f"--device gpu: {cpu_fallback.VARIABLE} asks for the CPU in place of GPUs"
        )
    comm.agree("bench: device", error=error)
    device: Any = choose_device(comm)
    cupy = device.xp
    name = cupy.cuda.runtime.getDeviceProperties(device.device.id)["name"].decode()

    def synchronize() -> None:
        cupy.cuda.get_current_stream().synchronize()

    timing = settings.timing.on_device(synchronize)
    return BenchDevice("gpu", cupy, f"gpu ({name})"), settings.with_timing(timing)
