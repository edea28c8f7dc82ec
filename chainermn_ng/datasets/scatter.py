"""Sharing a data set out between the ranks."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import numpy as np

import communicators
from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.datasets.scatter_plan import ScatterPlan, exact_part
from chainermn_ng.datasets.scattered_dataset import ScatteredDataset
from chainermn_ng.datasets.shared import share_in_host
from communicators.arguments import check_max_buf_len, check_root

# Messages of a scatter in progress are told apart from those of the script by it.
_TAG = 15_990


class DataSizeError(RuntimeError):
    """A number of samples that cannot be shared out."""


def scatter_dataset(
    dataset: Any,
    comm: Any,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
    in_memory: bool | None = None,
    shared_memory: bool = False,
) -> ScatteredDataset:
    """Give each rank its shard of the data set of rank ``root``. Collective.

    The shards are consecutive parts of the data set, or of its shuffled order, and
    differ in length by one at most. For training they must be equally long, or the
    ranks would take different numbers of steps; so by default the short ones repeat
    their first sample at the end. The repeats are marked: ``n_padding`` of the result
    counts them, and :func:`~chainermn_ng.create_multi_node_evaluator` leaves them out.

    Only the shard travels, if the samples are in memory: see
    :func:`~chainermn_ng.datasets.cutting.is_in_memory` for the kinds of data sets.
    Others, which read or make a sample when it is asked for, travel as they are,
    pickled, and each rank asks for its own samples only.

    Args:
        dataset: at ``root`` anything with a length and samples; ignored elsewhere.
            With fewer samples than ranks some shards have padding only, or nothing;
            an empty one gives empty shards on all ranks.
        comm: communicator of this package, of the engine, or of mpi4py.
        root: the rank that has the data set.
        shuffle: share out in a random order.
        seed: of that order, between 0 and 2**32 - 1, used at ``root``; ``None`` for
            another one each time.
        max_buf_len: bytes of one message at most.
        force_equal_length: with ``False`` no sample is repeated and the shards'
            lengths may differ. Right for validation, not for training.
        in_memory: ``True`` cuts the samples out of any data set, reading each once,
            at ``root``, now; right for a class of one's own that holds its samples in
            memory and returns them unchanged. ``False`` sends any data set whole.
        shared_memory: put the whole data set into memory that the ranks of a host
            share, as :func:`~chainermn_ng.datasets.share_in_host` does, and let each
            shard select its samples there: one copy of the set a host, read-only. For
            data sets of NumPy arrays.

    Returns:
        ScatteredDataset: this rank's shard.

    Raises:
        TypeError: the data set has no length or cannot be pickled; on all ranks.
        ValueError: a bad root, seed or ``max_buf_len``; on all ranks.
        MismatchError: the ranks gave different arguments.
    """
    with engine_of(comm) as engine:
        plan, error = None, None
        try:
            check_root(root, engine.size, "scatter_dataset")
            check_max_buf_len(max_buf_len, "scatter_dataset")
            if shared_memory and in_memory is not None:
                raise ValueError(
                    "scatter_dataset: in_memory or shared_memory, not both"
                )
            if engine.rank == root:
                plan = ScatterPlan(
                    dataset, engine.size, shuffle, seed, force_equal_length
                )
                if not shared_memory:
                    plan.decide(in_memory)
        except Exception as failure:
            error = failure
        details = f"root={root}, force_equal_length={force_equal_length}"
        if shared_memory:
            details += ", shared_memory=True"
        engine.agree("scatter_dataset", details, error=error)
        if shared_memory:
            shard = _shard_of_shared(engine, plan, root)
        elif plan is not None:
            shard = _send_shards(engine, plan, max_buf_len)
        else:
            shard = _receive_shard(engine, root)
    if isinstance(comm, ChainerCommunicator):
        comm.longest_shard = max(comm.longest_shard, len(shard))
    return shard


def scatter_index(
    n_total_samples: int, comm: Any, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Return this rank's part of a data set that all ranks have. Collective.

    For data that every rank can read itself: nothing but the number travels. Use it
    as ``chainer.datasets.SubDataset(dataset, begin, end, order)``, with the same
    ``order`` on all ranks.

    Args:
        n_total_samples: number of samples; that of ``root`` counts.
        comm: communicator of this package, of the engine, or of mpi4py.
        root: see ``n_total_samples``.
        force_equal_length: make all parts equally long; then neighbours overlap by
            one sample where the number is not a multiple of the ranks. With
            ``False`` no sample is in two parts.

    Returns:
        tuple: first index, and the one after the last.

    Raises:
        DataSizeError: the number is negative; on all ranks.
        ValueError: a bad root; on all ranks.
    """
    with engine_of(comm) as engine:
        error = None
        try:
            check_root(root, engine.size, "scatter_index")
            n_samples = operator.index(n_total_samples) if engine.rank == root else 0
        except (TypeError, ValueError) as failure:
            error = failure
        details = f"root={root}, force_equal_length={force_equal_length}"
        engine.agree("scatter_index", details, error=error)
        n_samples = engine.bcast_obj(n_samples, root=root)
        rank, size = engine.rank, engine.size
    if n_samples < 0:
        raise DataSizeError(f"scatter_index: {n_samples} samples cannot be shared out")
    if force_equal_length:
        begin = n_samples * rank // size
        return begin, begin + -(-n_samples // size)
    return exact_part(n_samples, size, rank)


def _shard_of_shared(
    engine: communicators.CommunicatorBase, plan: ScatterPlan | None, root: int
) -> ScatteredDataset:
    parts, dataset = None, None
    if plan is not None:
        dataset = plan.dataset
        parts = [plan.shard(rank)[1:] for rank in range(plan.size)]
    positions, indices, n_padding = engine.scatter_obj(parts, root=root)
    base = share_in_host(engine, dataset, root=root)
    return ScatteredDataset(base, positions, indices, n_padding)


def _send_shards(
    engine: communicators.CommunicatorBase, plan: ScatterPlan, max_buf_len: int
) -> ScatteredDataset:
    error: Exception | None = None
    shard = None
    for rank in range(plan.size):
        parcels = None
        if error is None:
            # One shard at a time is in memory twice.
            try:
                if rank == engine.rank:
                    base, *rest = plan.shard(rank)
                    base = base if plan.cuts else plan.dataset
                    shard = ScatteredDataset(base, *rest)
                    continue
                parcels = plan.parcels(rank)
            except Exception as failure:
                error = failure
        if rank == engine.rank:
            continue
        # The receiver learns from None that nothing comes.
        sizes = None if parcels is None else [parcel.size for parcel in parcels]
        engine.send_obj((sizes, max_buf_len), rank, _TAG)
        for parcel in parcels or []:
            for start in range(0, parcel.size, max_buf_len):
                engine.send(parcel[start : start + max_buf_len], rank, _TAG)
    engine.agree("scatter_dataset, shards", error=error)
    assert shard is not None
    return shard


def _receive_shard(
    engine: communicators.CommunicatorBase, root: int
) -> ScatteredDataset:
    error: Exception | None = None
    shard = None
    sizes, max_buf_len = engine.recv_obj(root, _TAG)
    parcels = []
    for size in sizes or []:
        parcel = np.empty(size, np.uint8)
        for start in range(0, size, max_buf_len):
            parcel[start : start + max_buf_len] = engine.recv(root, _TAG)
        parcels.append(parcel)
    if sizes is not None:
        try:
            base, *rest = pickle.loads(parcels[-1])
            base = base if len(parcels) == 1 else pickle.loads(parcels[0])
            shard = ScatteredDataset(base, *rest)
        except Exception as failure:
            error = TypeError(
                f"rank {engine.rank} cannot unpickle its shard "
                f"({type(failure).__name__}: {failure})"
            )
    engine.agree("scatter_dataset, shards", error=error)
    assert shard is not None
    return shard
