"""All rows of the comparison, with their goals, and what measures them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.results import Row, Table
from benchmarks.row_groups import (
    between_hosts,
    imports,
    memory,
    one_host,
    overlap,
    scaling,
    steps,
)
from benchmarks.settings import Settings

PEERS = "best of ChainerMN 7.8.1 naive, flat mpi4py Allreduce, flat torch gloo"
LINK = "what the link alone needs (iperf3)"
MEAN = "mean of ResNet-50's gradients, one host"


@dataclass(frozen=True)
class Comparison:
    """A row before it is measured; ``measure(row, settings)`` fills it."""

    what: str
    against: str
    goal: float
    measure: Callable[[Row, Settings], None] = field(compare=False)


def _over_hosts(n_hosts: int, per_host: int, gradients: str) -> Comparison:
    hosts = {2: "two hosts", 4: "four hosts"}[n_hosts]
    ranks = "2 ranks" if per_host == 2 else "1 rank"
    load = {"16MiB": "16 MiB", "resnet50": "ResNet-50's gradients"}[gradients]
    return Comparison(
        f"{load}, {hosts} x {ranks}, links of 1 Gbit/s",
        LINK,
        {2: 1.12, 4: 1.15}[n_hosts],
        partial(
            between_hosts.measure,
            n_hosts=n_hosts,
            ranks_per_host=per_host,
            gradients=gradients,
        ),
    )


COMPARISONS = {
    "one-host-2": Comparison(
        f"{MEAN}, 2 ranks", PEERS, 0.50, partial(one_host.measure, n_ranks=2)
    ),
    "one-host-4": Comparison(
        f"{MEAN}, 4 ranks", PEERS, 0.55, partial(one_host.measure, n_ranks=4)
    ),
    "two-hosts-16mib": _over_hosts(2, 2, "16MiB"),
    "two-hosts-resnet50": _over_hosts(2, 2, "resnet50"),
    "four-hosts-16mib": _over_hosts(4, 1, "16MiB"),
    "four-hosts-resnet50": _over_hosts(4, 1, "resnet50"),
    "small": Comparison(
        "64 KiB in 20 arrays, two hosts x 2 ranks, links of 1 Gbit/s",
        "flat mpi4py Allreduce of the same bytes",
        1.10,
        between_hosts.measure_small,
    ),
    "one-rank-step": Comparison(
        "step of the digits example, one rank, with this package",
        "Chainer alone, same model",
        1.02,
        steps.measure_one_rank,
    ),
    "agreement": Comparison(
        "step of the digits example, 2 ranks, with the agreement",
        "the step without it",
        1.01,
        steps.measure_agreement,
    ),
    "overlap": Comparison(
        "step with overlap, two hosts x 1 rank; backward as long as the link needs",
        "the step without communication",
        1.15,
        overlap.measure,
    ),
    "memory": Comparison(
        "memory beyond model and gradients, one host, 2 ranks",
        "gradient bytes",
        0.3,
        memory.measure,
    ),
    "import": Comparison(
        "import chainermn_ng", "import chainer", 1.10, imports.measure
    ),
}


@dataclass(frozen=True)
class Scaling:
    """A table before it is measured; ``measure(table, settings)`` adds its lines."""

    title: str
    columns: tuple[str, ...]
    measure: Callable[[Table, Settings], None] = field(compare=False)


SCALINGS = {
    "scaling-ranks": Scaling(
        "Cost of our own code by ranks: 161 small arrays, nothing sent",
        ("ranks on this machine", "call", "of that a rank's own", "making it"),
        scaling.measure_ranks,
    ),
    "scaling-arrays": Scaling(
        "Cost of our own code by arrays: 4 MiB, nothing sent",
        ("arrays", "1 rank", "its first call", "2 ranks", "their first call"),
        scaling.measure_arrays,
    ),
}
