"""What of the communication a step still waits for, with overlap and without."""

from __future__ import annotations

import statistics

from tests.helpers.hosts import VirtualHosts, virtual_hosts

from benchmarks.jobs import run_program
from benchmarks.links import CABLE, busy_links, check_hosts, link_rate
from benchmarks.results import Row, duration, slowest, spread_of_ratios, timing
from benchmarks.settings import Settings


def measure(row: Row, settings: Settings) -> None:
    """Fill the row: a step with overlap over the step without communication."""
    check_hosts()
    width, n_steps = (512, 3) if settings.is_quick else (1024, 12)
    with virtual_hosts(2, rate=CABLE) as hosts:
        args = ["--rate", link_rate(hosts), "--width", width, "--steps", n_steps]
        ranks = run_program("overlap.py", args, n_ranks=1, hosts=hosts)
        slowdown = _slowdown_by_busy_links(hosts, ranks[0]["n_samples"], width, n_steps)
    seconds = {
        name: slowest([rank["seconds"][name] for rank in ranks])
        for name in ranks[0]["seconds"]
    }
    about = ranks[0]
    row.seconds = seconds
    row.peers = [duration(statistics.median(seconds["alone"]))]
    ratio = statistics.median(seconds["after"]) / statistics.median(seconds["alone"])
    row.notes += [
        timing("communication after the backward", seconds["after"])
        + f", ratio {ratio:.2f}",
        f"{about['nbytes'] / 1e6:.1f} MB of gradients, which the link alone needs "
        f"{duration(about['link_s'])} for; {about['n_samples']} samples a rank, whose "
        f"backward took {duration(about['backward_s'])}",
        "the step without communication took "
        f"{slowdown:.2f} times as long while iperf3 kept the links busy both ways, "
        "which is what the kernel needs for the cables",
    ]
    row.ours = timing("overlap", seconds["overlap"])
    row.ratio = statistics.median(seconds["overlap"]) / statistics.median(
        seconds["alone"]
    )
    row.spread = spread_of_ratios(seconds["overlap"], seconds["alone"])


def _slowdown_by_busy_links(
    hosts: VirtualHosts, n_samples: int, width: int, n_steps: int
) -> float:
    """Return what steps that send nothing take while others send, over what they take.

    Before and after, as the machine's speed drifts.
    """
    args = ["--samples", n_samples, "--width", width, "--steps", n_steps]

    def step_seconds() -> float:
        ranks = run_program("overlap.py", args, n_ranks=1, hosts=hosts)
        seconds = slowest([rank["seconds"]["alone"] for rank in ranks])
        return statistics.median(seconds)

    before = step_seconds()
    with busy_links(hosts):
        meanwhile = step_seconds()
    return 2 * meanwhile / (before + step_seconds())
