"""Work that one rank of each host does for the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import communicators
from chainermn_ng.communicators.factory import engine_of

Result = TypeVar("Result")


def run_once_per_host(
    comm: Any, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Call a function on one rank of each host and give its result to the others.

    Collective. For what the ranks of a host would do to the same files: download a
    data set, unpack it, build a cache. The others wait without a time limit, and
    without taking a processor from the one that works.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py.
        function: called on the rank of each host whose ``intra_rank`` is 0.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        What ``function`` returned on this host; a copy, made by pickling, on the
        ranks that did not call it. A large result costs memory on each of them: let
        the function return ``None`` and read the files it made instead.

    Raises:
        Exception: ``function`` raised, or its result cannot be pickled, on some host:
            on all ranks of all hosts; there as it is, elsewhere as TypeError,
            ValueError, OSError, or RankFailedError. A rank that leaves the program
            meanwhile gives MismatchError.
    """
    with engine_of(comm) as engine:
        # The communicator's own waits are limited.
        patient = communicators.create_communicator(
            "naive", engine.mpi_comm, topology=engine.topology, timeout_s=None
        )
        with patient:
            works = patient.intra_rank == 0
            result, packed, error = None, b"", None
            if works:
                try:
                    result = function(*args, **kwargs)
                    if patient.intra_size > 1:
                        packed = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
                except Exception as failure:
                    error = failure
            try:
                patient.agree("run_once_per_host", error=error)
            except Exception:
                patient.finalize()
                if error is not None:
                    raise error from None
                raise
            host = patient.split(patient.inter_rank, patient.rank)
            assert host is not None
            with host:
                packed = host.bcast_obj(packed)
    return result if works else pickle.loads(packed)
