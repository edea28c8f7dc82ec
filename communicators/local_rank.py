"""Which of the job's processes on this host a process is: for choosing a device."""

from __future__ import annotations

import os
from typing import Any

from communicators.errors import CommunicatorError
from communicators.topology import Topology

_LAUNCHER_VARIABLES = (
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMIX_LOCAL_RANK",
    "SLURM_LOCALID",
)

_known: int | None = None


def remember_local_rank(
    hosts: Topology, members: list[int], rank: int, world: Any
) -> None:
    """Note this process's place on its host from a communicator that spans the job.

    Args:
        hosts: the real topology of a communicator.
        members: the world's rank of each of its ranks.
        rank: this process's rank in it.
        world: MPI's world communicator.
    """
    global _known
    if _known is None and len(members) == world.Get_size():
        mates = [members[r] for r in hosts.ranks_of(hosts.inter_rank(rank))]
        _known = sorted(mates).index(members[rank])


def local_rank() -> int:
    """Return this process's position among the job's processes on this host.

    Raises:
        CommunicatorError: no communicator has spanned the job yet, and the launcher
            does not tell.
    """
    if _known is not None:
        return _known
    for variable in _LAUNCHER_VARIABLES:
        text = os.environ.get(variable, "")
        if text.isdigit():
            return int(text)
    raise CommunicatorError(
        "world_intra_rank: this communicator does not span the whole job, and the "
        "launcher does not tell; create a communicator over all ranks first"
    )
