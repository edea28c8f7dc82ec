"""Epochs counted in iterations: ChainerMN's deprecated helpers."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any

from chainermn_ng.communicators.factory import engine_of


def get_n_iterations_for_one_epoch(
    dataset: Sized, local_batch_size: int, comm: Any
) -> int:
    """Return how many batches rank 0's shard makes, on all ranks. Collective.

    Deprecated: triggers by epoch do this.

    Args:
        dataset: the local shard.
        local_batch_size: samples in a batch of one rank.
        comm: communicator of this package, of the engine, or of mpi4py.
    """
    _warn("get_n_iterations_for_one_epoch")
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Sized, local_batch_size: int, comm: Any
) -> tuple[int, str]:
    """Return a trigger that fires every ``n_epochs`` epochs. Collective.

    Deprecated: ``(n_epochs, "epoch")`` does this.

    Args:
        n_epochs: number of epochs.
        dataset: the local shard.
        local_batch_size: samples in a batch of one rank.
        comm: communicator of this package, of the engine, or of mpi4py.
    """
    _warn("get_epoch_trigger")
    return n_epochs * _n_iterations(dataset, local_batch_size, comm), "iteration"


def _n_iterations(dataset: Sized, local_batch_size: int, comm: Any) -> int:
    with engine_of(comm) as engine:
        return engine.bcast_obj(-(-len(dataset) // local_batch_size))


def _warn(name: str) -> None:
    warnings.warn(
        f"{name} is deprecated; use a trigger by epoch",
        DeprecationWarning,
        stacklevel=3,
    )
