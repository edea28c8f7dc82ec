"""Dividing the cores of a host among its ranks.

NumPy's linear algebra starts one thread a core in every process. With several ranks on
a host they fight for the cores: a step of the digits example on four ranks and two
cores took more than six times as long as with one thread each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from fractions import Fraction

import threadpoolctl

import communicators

_logger = logging.getLogger("chainermn_ng")

#: Whoever sets one of these has decided, and nothing is changed.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def fair_share(mine: frozenset[int], on_this_host: Sequence[frozenset[int]]) -> int:
    """Return the number of threads that is this rank's part of its host's cores.

    Args:
        mine: the cores that this rank may run on.
        on_this_host: the same of every rank of the host, this one included. Ranks
            that the launcher has bound to cores of their own share with nobody.

    Returns:
        int: at least 1; a core that k ranks may use counts 1/k for each.
    """
    total = sum(
        (Fraction(1, sum(core in cores for cores in on_this_host)) for core in mine),
        start=Fraction(0),
    )
    return max(1, int(total))


def share_cores(engine: communicators.CommunicatorBase) -> int | None:
    """Limit this process's linear algebra to its share of the cores. Collective.

    Does nothing where the user has set a number of threads by one of
    :data:`THREAD_VARIABLES`, or where a rank has its host for itself.

    Args:
        engine: a communicator that spans the job.

    Returns:
        The number of threads, or ``None`` if nothing was changed.
    """
    cores = frozenset(_available_cores())
    has_decided = any(os.environ.get(name) for name in THREAD_VARIABLES)
    ranks = engine.allgather_obj((engine.real_host, cores))
    on_this_host = [cores for host, cores in ranks if host == engine.real_host]
    if has_decided or len(on_this_host) == 1:
        return None
    n_threads = fair_share(cores, on_this_host)
    # Libraries that are loaded later, and child processes, read the variable.
    os.environ["OMP_NUM_THREADS"] = str(n_threads)
    threadpoolctl.threadpool_limits(n_threads)
    _logger.info(
        "%d ranks share %d cores of this host: %d threads for linear algebra in rank "
        "%d (OMP_NUM_THREADS decides otherwise)",
        len(on_this_host),
        len(cores),
        n_threads,
        engine.rank,
    )
    return n_threads


def _available_cores() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
