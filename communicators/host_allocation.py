"""Agreeing on memory that the ranks of one machine share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.dtypes import Array
from communicators.errors import CommunicatorError
from communicators.transports import load

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase


def allocate_on_host(comm: CommunicatorBase, nbytes: int) -> Array:
    """Do what :meth:`CommunicatorBase.allocate_on_host` promises. Collective.

    The lowest rank of each machine makes the memory, the others map it.
    """
    host_memory = load("host_memory")
    offers = comm.allgather_obj((comm.real_host, nbytes))
    on_host = [rank for rank, (host, _) in enumerate(offers) if host == comm.real_host]
    wanted = [offers[rank][1] for rank in on_host]
    file, memory = None, None
    error: Exception | None = None
    try:
        if nbytes < 0 or len(set(wanted)) > 1:
            raise ValueError(
                f"allocate_on_host: nbytes is {wanted} on ranks {on_host}; expected "
                "one number, 0 or more"
            )
        if comm.rank == on_host[0]:
            file = host_memory.SharedFile(nbytes)
    except (OSError, ValueError, CommunicatorError) as failure:
        error = failure
    try:
        comm.agree("allocate_on_host", error=error)
        tickets = comm.allgather_obj(None if file is None else file.ticket)
        try:
            memory = host_memory.map_file(tickets[on_host[0]], nbytes)
        except OSError as failure:
            error = failure
        # Until then the maker's descriptor must stay open.
        comm.agree("allocate_on_host, mapping", error=error)
    finally:
        if file is not None:
            file.close()
    assert memory is not None
    return memory
