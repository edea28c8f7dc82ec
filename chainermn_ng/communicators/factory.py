"""Making communicators, and accepting what callers hand in as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import communicators
from chainermn_ng import cpu_fallback
from chainermn_ng.communicators.chainer_communicator import ChainerCommunicator
from chainermn_ng.communicators.settings import warn_of_batched_copy
from chainermn_ng.threads import share_cores


def create_communicator(
    communicator_name: str = "auto",
    mpi_comm: Any = None,
    allreduce_grad_dtype: Any = None,
    **kwargs: Any,
) -> ChainerCommunicator:
    """Create a communicator by name. Collective.

    A communicator over the whole job also divides the cores of each host among its
    ranks (see :mod:`chainermn_ng.threads`).

    Args:
        communicator_name: how gradients travel; see
            :func:`communicators.known_communicators`.
        mpi_comm: mpi4py communicator; by default all ranks of the job.
        allreduce_grad_dtype: dtype of gradients while they travel; ``None`` keeps
            their own.
        kwargs: further options, among them ``topology``, ``bucket_bytes`` and
            ``timeout_s``; see :func:`communicators.create_communicator`.
            ChainerMN's ``batched_copy`` is accepted with a warning.

    Raises:
        ValueError: an unknown name; the text lists the known ones.
        TypeError: an option that the communicator does not have.
        UnavailableError: something is missing on this machine.
        TopologyError: it cannot work on this topology.
    """
    if kwargs.pop("batched_copy", None) is not None:
        warn_of_batched_copy(stacklevel=3)
    kwargs["allreduce_grad_dtype"] = allreduce_grad_dtype
    name = cpu_fallback.substitute(communicator_name)
    try:
        engine = communicators.create_communicator(name, mpi_comm, **kwargs)
    except communicators.UnavailableError as error:
        cpu_fallback.explain(error, name)
        raise
    if mpi_comm is None:
        share_cores(engine)
    return ChainerCommunicator(engine)


@contextlib.contextmanager
def engine_of(comm: Any) -> Iterator[communicators.CommunicatorBase]:
    """Give the engine communicator of ``comm`` for the time of a ``with`` block.

    Args:
        comm: a communicator of this package, an engine communicator, or one of
            mpi4py, for which an engine is made and released again (collective).

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(comm, ChainerCommunicator):
        yield comm.engine
    elif isinstance(comm, communicators.CommunicatorBase):
        yield comm
    elif hasattr(comm, "Get_rank") and hasattr(comm, "Split"):
        with communicators.create_communicator("naive", comm) as engine:
            yield engine
    else:
        raise TypeError(
            f"expected a communicator of chainermn_ng, of the package communicators, "
            f"or of mpi4py; got {type(comm).__qualname__}"
        )


def lasting_engine_of(comm: Any) -> communicators.CommunicatorBase:
    """Return the engine communicator of ``comm``, for objects that keep it.

    Args:
        comm: a communicator of this package, or an engine communicator.

    Raises:
        TypeError: it is neither; one of mpi4py lacks the engine.
    """
    if isinstance(comm, ChainerCommunicator):
        return comm.engine
    if isinstance(comm, communicators.CommunicatorBase):
        return comm
    raise TypeError(
        "expected a communicator made by chainermn_ng.create_communicator; got "
        f"{type(comm).__module__}.{type(comm).__qualname__}"
    )
