"""Contenders take turns in the same jobs; ours are sifted first."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

from communicators import available_communicators
from tests.helpers.hosts import VirtualHosts

from benchmarks.jobs import run_program
from benchmarks.results import slowest
from benchmarks.settings import Settings

#: Of ours, how many stay after the sifting; the default always does.
N_FINALISTS = 2
Seconds = dict[str, list[float]]


def our_candidates(settings: Settings, *, several_hosts: bool) -> list[str]:
    """Return the communicators that compete for the best of ours."""
    if settings.communicators:
        return list(settings.communicators)
    if settings.is_quick:
        return ["auto", "flat"]
    # The first averages nothing, the others are for GPUs.
    unfit = {"dummy", "pure_nccl", "non_cuda_aware"}
    if several_hosts:
        unfit.add("single_node")
    return [name for name in available_communicators() if name not in unfit]


def reduce_in_turns(
    contenders: Sequence[str],
    gradients: str,
    *,
    rounds: int,
    warmup: int = 2,
    n_ranks: int,
    hosts: VirtualHosts | None = None,
    calls: int = 1,
) -> Seconds:
    """Run one job; return seconds a call by contender and round, slowest ranks'.

    Args:
        contenders: see ``programs/contenders.py``.
        gradients: a set of ``gradient_shapes.py``.
        rounds: in each, every contender has a turn.
        warmup: rounds before these, which do not count.
        n_ranks, hosts: see :func:`benchmarks.jobs.run_program`.
        calls: how often it reduces in a turn.
    """
    args = ["--gradients", gradients, "--rounds", rounds, "--calls", calls]
    args += ["--warmup", warmup, *contenders]
    ranks = run_program("reduce.py", args, n_ranks=n_ranks, hosts=hosts)
    return {name: slowest([rank[name] for rank in ranks]) for name in contenders}


def best_of(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names with the least medians, and the default if it competes."""
    ranking = sorted(seconds, key=lambda name: statistics.median(seconds[name]))
    default = [name for name in ranking[N_FINALISTS:] if name == "ours:auto"]
    return ranking[:N_FINALISTS] + default


def contest(
    settings: Settings,
    ours: Sequence[str],
    peers: Sequence[str],
    gradients: str,
    *,
    n_ranks: int,
    hosts: VirtualHosts | None = None,
    calls: int = 1,
    scale: float = 1.0,
    pause: Callable[[], None] = lambda: None,
) -> tuple[Seconds, list[str]]:
    """Sift ours in a short job, then let the best and the peers take turns.

    Args:
        ours, peers: names of contenders.
        scale: how many times the settings' rounds.
        pause: called before, between and after the jobs.

    Returns:
        Seconds by contender over all jobs, and which of ours took part.
    """
    finalists = [f"ours:{name}" for name in ours]
    run = functools.partial(
        reduce_in_turns,
        rounds=settings.rounds_per_block(scale),
        n_ranks=n_ranks,
        hosts=hosts,
        calls=calls,
    )
    if len(finalists) > N_FINALISTS:
        first = run(finalists, gradients)
        finalists = best_of(first)
    seconds: Seconds = {name: [] for name in [*finalists, *peers]}
    for _ in range(settings.blocks):
        pause()
        job = run([*finalists, *peers], gradients, warmup=1 if settings.is_quick else 2)
        for name, values in job.items():
            seconds[name] += values
    pause()
    return seconds, finalists
