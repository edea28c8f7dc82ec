"""``chainermn-ng plan``: what a training would take on a cluster that one describes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from chainermn_ng.cli import plan_output
from chainermn_ng.cli.bench_plot import check_plot
from chainermn_ng.cli.inputs import BadInput, check_folder
from chainermn_ng.cli.predictions import Load, names_for, predict_all, script_line
from chainermn_ng.cli.quantities import BANDWIDTH, BYTES, SECONDS
from communicators.byte_sizes import format_bytes
from communicators.cost_model import Cluster
from communicators.cost_presets import PRESETS
from communicators.cost_search import Training
from communicators.gradient_sets import GRADIENT_SETS, shapes_of

if TYPE_CHECKING:
    from communicators.cost_fit import Fit

_R = TypeVar("_R")

SCHEMA = "chainermn-ng plan"
VERSION = 1

#: Option -> field of a cluster.
_FIELDS = {
    "hosts": "hosts",
    "ranks_per_host": "ranks_per_host",
    "nics": "nics",
    "intra_bandwidth": "intra_bytes_s",
    "inter_bandwidth": "inter_bytes_s",
    "intra_latency": "intra_latency_s",
    "inter_latency": "inter_latency_s",
    "call_time": "call_s",
    "flow_limit": "flow_bytes_s",
    "shared_memory": "shared_memory",
    "memory_bandwidth": "memory_bytes_s",
    "host_copy_bandwidth": "host_copy_bytes_s",
}
_WIRE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class _Model(click.ParamType[Load]):
    """A network by name, or a number of bytes in float32."""

    name = "model"

    def convert(self, value: Any, param: Any, ctx: Any) -> Load:
        if isinstance(value, Load):
            return value
        if value in GRADIENT_SETS:
            shapes = shapes_of(value)
            n_elems = sum(math.prod(shape) for shape in shapes)
            return Load(value, 4 * n_elems, len(shapes))
        try:
            nbytes = BYTES.convert(value, param, ctx)
        except click.UsageError as error:
            known = ", ".join(sorted(GRADIENT_SETS))
            text = f"{error.message} of all gradients, or one of {known}"
            self.fail(text, param, ctx)
        return Load(format_bytes(nbytes), nbytes, 1)


@click.command()
@click.option(
    "--cluster",
    "preset",
    type=click.Choice(sorted(PRESETS)),
    help="Begin with this one; other options change it.",
)
@click.option("--hosts", type=click.IntRange(1), help="Number of hosts.")
@click.option(
    "--gpus-per-host",
    "--ranks-per-host",
    "ranks_per_host",
    type=click.IntRange(1),
    help="Ranks on each host.",
)
@click.option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    help="Where the gradients are. [default: gpu, or the cluster's]",
)
@click.option(
    "--intra-bandwidth", type=BANDWIDTH, help="Of one rank in its host: 30GB/s."
)
@click.option(
    "--inter-bandwidth", type=BANDWIDTH, help="Of one network card: 100Gbit/s."
)
@click.option("--intra-latency", type=SECONDS, help="Of a step in a host: 5us.")
@click.option("--inter-latency", type=SECONDS, help="Of a step between hosts: 15us.")
@click.option("--nics", type=click.IntRange(1), help="Network cards of a host.")
@click.option("--flow-limit", type=BANDWIDTH, help="The most that one flow carries.")
@click.option("--call-time", type=SECONDS, help="To begin one collective: 10us.")
@click.option(
    "--shared-memory/--no-shared-memory",
    default=None,
    help="Ranks of a host reduce in common memory. [default: on the CPU]",
)
@click.option(
    "--memory-bandwidth", type=BANDWIDTH, help="Of a host's memory, for all its ranks."
)
@click.option(
    "--host-copy-bandwidth",
    type=BANDWIDTH,
    help="Between GPU and host memory, for non_cuda_aware. [default: 12GB/s]",
)
@click.option(
    "--model",
    "load",
    type=_Model(),
    default="resnet50",
    show_default=True,
    help="resnet50, vgg16, transformer-base, or the bytes of all gradients.",
)
@click.option(
    "--wire-dtype",
    type=click.Choice(sorted(_WIRE_BYTES)),
    help="In which the gradients travel. [default: float32]",
)
@click.option(
    "--bucket-size", type=BYTES, help="Bytes of a bucket. [default: the best]"
)
@click.option(
    "--compute-time",
    type=SECONDS,
    help="Of one step on one rank; needed for step times and efficiency.",
)
@click.option(
    "--overlap",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Part of the backward pass that communication can go on beside.",
)
@click.option(
    "--jitter",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Relative standard deviation of the compute time.",
)
@click.option(
    "--pack-time", type=SECONDS, default="0s", help="To pack and unpack the gradients."
)
@click.option(
    "--communicator",
    "names",
    multiple=True,
    help="Only these; may be given several times. [default: all]",
)
@click.option(
    "--from",
    "measured_paths",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    help="Fit latencies and bandwidths to this file of `chainermn-ng bench --json`; "
    "may be given several times. What is given beside it is kept.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write JSON; - prints it.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False),
    help="Draw into this file (.png, .pdf, .svg).",
)
@click.pass_context
def plan(ctx: click.Context, **options: Any) -> None:
    """Predict step times and efficiency for hosts and networks.

    Closed formulas, not a simulation: they rank communicators and show what a network
    costs. Measure before you trust the last tenth.
    """
    _check_files(options["json_path"], options["plot_path"])
    measured = _read(options["measured_paths"])
    device = _device(options, measured)
    cluster = _cluster(options, device, measured)
    fit = None
    if measured:
        cluster, fit = _fitted(ctx, options, cluster, measured)
    load = _load(options)
    training = _training(options)
    names = _names(options["names"], device)
    rounds = predict_all(cluster, names, load, training)
    best = rounds[-1][0]
    line = script_line(best, load, options["wire_dtype"])
    content = _content(cluster, device, load, training, fit, rounds, line)
    if options["json_path"] == "-":
        click.echo(json.dumps(content, indent=1))
    else:
        plan_output.show(cluster, load, training, fit, rounds, line)
        for note in _notes(measured):
            click.echo(note)
        if options["json_path"]:
            _or_failed("--json", _write, options["json_path"], content)
    if options["plot_path"]:
        title = f"{load.name} on {device.upper()}s"
        _or_failed("--plot", plan_output.plot, options["plot_path"], rounds, title)


# -- from options to the model --------------------------------------------------------


def _check_files(json_path: str | None, plot_path: str | None) -> None:
    if json_path not in (None, "-"):
        _or_error("--json", check_folder, "--json", json_path)
    if plot_path is not None:
        _or_error("--plot", check_plot, plot_path)
        _or_error("--plot", check_folder, "--plot", plot_path)


def _read(paths: tuple[str, ...]) -> list[Any]:
    if not paths:
        return []
    # Only here is the rest of the engine needed.
    from chainermn_ng.cli.measured_rows import read_measured

    found = [_or_error("--from", read_measured, path) for path in paths]
    devices = {one.device for one in found}
    if len(devices) > 1:
        raise BadInput("--from: one file is of arrays on the CPU, another on GPUs")
    return found


def _device(options: dict[str, Any], measured: list[Any]) -> str:
    if options["device"]:
        return str(options["device"])
    if measured:
        return str(measured[0].device)
    return PRESETS[options["preset"]].device if options["preset"] else "gpu"


def _cluster(options: dict[str, Any], device: str, measured: list[Any]) -> Cluster:
    given = {
        field: options[option]
        for option, field in _FIELDS.items()
        if options[option] is not None
    }
    if options["preset"]:
        base = dataclasses.asdict(PRESETS[options["preset"]].cluster)
    else:
        base = {"is_striped": device == "gpu", "shared_memory": device == "cpu"}
    if device == "gpu":
        base["host_copy_bytes_s"] = 12e9
    if measured:
        largest = max(measured, key=lambda one: one.topology.size).topology
        base.setdefault("hosts", largest.n_hosts)
        base.setdefault("ranks_per_host", largest.host_sizes[0])
        # Sought from the rows, wherever the search begins.
        base.setdefault("intra_bytes_s", 1e9)
        base.setdefault("inter_bytes_s", 1e9)
    _check_complete({**base, **given})
    return Cluster(**{"inter_bytes_s": 1.0, "intra_bytes_s": 1.0, **base, **given})


def _check_complete(values: dict[str, Any]) -> None:
    needed = {"hosts": "--hosts", "ranks_per_host": "--gpus-per-host"}
    if values.get("ranks_per_host", 2) > 1:
        needed["intra_bytes_s"] = "--intra-bandwidth"
    if values.get("hosts", 2) > 1:
        needed["inter_bytes_s"] = "--inter-bandwidth"
    missing = [option for field, option in needed.items() if field not in values]
    if missing:
        raise click.UsageError(
            f"missing {', '.join(missing)}; or begin with --cluster "
            f"({', '.join(sorted(PRESETS))}) or --from bench.json"
        )


def _fitted(
    ctx: click.Context, options: dict[str, Any], cluster: Cluster, measured: list[Any]
) -> tuple[Cluster, Fit]:
    from chainermn_ng.cli.measured_rows import fit_measured

    fixed = [
        field
        for option, field in _FIELDS.items()
        if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE
    ]
    fit = _or_error(
        "--from", fit_measured, cluster, measured, fixed, options["shared_memory"]
    )
    unknown = _not_measured(cluster, fit, fixed, bool(options["preset"]))
    if unknown:
        raise BadInput(
            f"--from: the rows say nothing of {' and '.join(unknown)}: give the "
            "bandwidth, or add a measurement"
        )
    return fit.cluster, fit


def _not_measured(
    cluster: Cluster, fit: Fit, fixed: list[str], has_preset: bool
) -> list[str]:
    found = []
    if has_preset:
        return found
    for side, field, needs in (
        ("links in a host", "intra_bytes_s", cluster.ranks_per_host > 1),
        ("links between hosts", "inter_bytes_s", cluster.hosts > 1),
    ):
        if needs and field not in fit.fitted and field not in fixed:
            found.append(side)
    return found


def _load(options: dict[str, Any]) -> Load:
    load: Load = options["load"]
    nbytes = load.nbytes * _WIRE_BYTES[options["wire_dtype"] or "float32"] / 4
    bucket = options["bucket_size"]
    return dataclasses.replace(
        load,
        nbytes=nbytes,
        bucket_bytes=None if bucket is None else max(1, int(bucket)),
    )


def _training(options: dict[str, Any]) -> Training | None:
    if options["compute_time"] is None:
        return None
    return _or_error(
        "--compute-time",
        Training,
        options["compute_time"],
        options["pack_time"],
        options["overlap"],
        options["jitter"],
    )


def _names(wanted: tuple[str, ...], device: str) -> tuple[str, ...]:
    known = names_for(device)
    for name in wanted:
        if name not in known:
            raise click.UsageError(
                f"--communicator {name}: on the {device.upper()} there are "
                f"{', '.join(known)}"
            )
    return wanted or known


# -- results --------------------------------------------------------------------------


def _notes(measured: list[Any]) -> list[str]:
    return [
        f"{one.path}: its topology {one.topology} was pretended: what is between "
        "hosts there is not a network"
        for one in measured
        if one.is_pretended
    ]


def _content(
    cluster: Cluster,
    device: str,
    load: Load,
    training: Training | None,
    fit: Fit | None,
    rounds: list[list[Any]],
    line: str,
) -> dict[str, Any]:
    """Return what ``--json`` writes; no infinities, which JSON lacks."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "device": device,
        "cluster": {
            key: None if isinstance(value, float) and math.isinf(value) else value
            for key, value in dataclasses.asdict(cluster).items()
        },
        "load": dataclasses.asdict(load),
        "training": None if training is None else dataclasses.asdict(training),
        "fit": None
        if fit is None
        else {
            "fitted": {name: getattr(fit.cluster, name) for name in fit.fitted},
            "uncertainty": fit.uncertainty,
            "residual": fit.residual,
            "worst_row": dataclasses.asdict(fit.worst),
            "worst_error": fit.worst_error,
        },
        "rows": [_row(p) for predictions in rounds for p in predictions],
        "recommended": line,
    }


def _row(prediction: Any) -> dict[str, Any]:
    choice = prediction.choice
    return {
        "communicator": choice.name,
        "hosts": prediction.hosts,
        "ranks_per_host": prediction.ranks_per_host,
        "ranks": prediction.n_ranks,
        "dims": choice.dims,
        "n_pieces": choice.n_pieces,
        "allreduce_s": choice.seconds,
        "step_s": prediction.step_s,
        "efficiency": prediction.efficiency,
    }


def _write(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def _or_error(option: str, function: Callable[..., _R], *arguments: Any) -> _R:
    """Call a function that takes input: what is wrong with it has status 2."""
    try:
        return function(*arguments)
    except (OSError, ValueError) as error:
        text = str(error).removeprefix(f"{option} ")
        raise BadInput(f"{option}: {text}") from error


def _or_failed(option: str, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function that writes a file: what fails on the way has status 1."""
    try:
        function(*arguments)
    except OSError as error:
        raise click.ClickException(f"{option}: {error}") from error
