"""Reductions over virtual hosts on shaped cables, against what the link alone needs."""

from __future__ import annotations

import statistics

from tests.helpers.hosts import virtual_hosts

from benchmarks.contest import contest, our_candidates
from benchmarks.gradient_shapes import nbytes_of
from benchmarks.links import (
    CABLE,
    check_hosts,
    link_rate,
    link_seconds,
    megabits,
    ring_rate,
)
from benchmarks.results import (
    Row,
    compare,
    duration,
    fastest,
    quartiles,
    timing,
)
from benchmarks.settings import Settings


def measure(
    row: Row, settings: Settings, n_hosts: int, ranks_per_host: int, gradients: str
) -> None:
    """Fill the row: seconds of the best of ours over those of the link alone."""
    check_hosts()
    rates: list[float] = []
    candidates = our_candidates(settings, several_hosts=True)
    # A round of the large set takes seconds.
    scale = 1.0 if nbytes_of(gradients) < 50e6 else 1 / 2
    with virtual_hosts(n_hosts, rate=CABLE) as hosts:
        ring = ring_rate(hosts)
        seconds, ours = contest(
            settings,
            candidates,
            ["mpi4py:flat"],
            gradients,
            n_ranks=ranks_per_host,
            hosts=hosts,
            scale=scale,
            pause=lambda: rates.append(link_rate(hosts)),
        )
    alone_s = link_seconds(n_hosts, nbytes_of(gradients), statistics.median(rates))
    best = fastest(seconds, ours)
    row.seconds = seconds
    row.ours = timing(best, seconds[best])
    row.peers = [duration(alone_s)]
    row.ratio = statistics.median(seconds[best]) / alone_s
    row.spread = quartiles([value / alone_s for value in seconds[best]])
    row.notes.append(
        f"one stream carried {megabits(min(rates))} to {megabits(max(rates))} Mbit/s "
        f"({len(rates)} times); with every host sending to the next one at once, the "
        f"slowest got {megabits(ring)} Mbit/s"
    )
    others = [name for name in seconds if name != best]
    row.notes.append(
        "also measured: " + ", ".join(timing(name, seconds[name]) for name in others)
    )


def measure_small(row: Row, settings: Settings) -> None:
    """Fill the row of few bytes in many arrays, where latency is what counts."""
    check_hosts()
    candidates = our_candidates(settings, several_hosts=True)
    peers = ["mpi4py:flat"]
    found = {}
    with virtual_hosts(2, rate=CABLE) as hosts:
        for n_ranks in (2, 1):
            found[n_ranks] = contest(
                settings,
                candidates,
                peers,
                "64KiB",
                n_ranks=n_ranks,
                hosts=hosts,
                # The ranks do not leave the barrier at once; over many calls that is
                # lost.
                calls=20,
                scale=2.0,
            )
    compare(row, *found[2], peers)
    seconds, ours = found[1]
    best = min(ours, key=lambda name: statistics.median(seconds[name]))
    ratio = statistics.median(seconds[best]) / statistics.median(seconds[peers[0]])
    row.notes.append(
        f"one rank a host: {timing(best, seconds[best])}, "
        f"{timing(peers[0], seconds[peers[0]])}, ratio {ratio:.2f}"
    )
