"""How many samples a batch has, and whether it fits the shard."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from chainermn_ng.communicators import ChainerCommunicator


def count_first_argument(*args: Any, **kwargs: Any) -> int:
    """Return the length of the first argument of a loss function: its batch."""
    for value in itertools.chain(args, kwargs.values()):
        if hasattr(value, "__len__"):
            return len(value)
    raise TypeError(
        "count_samples: no argument of the loss function has a length; give a "
        "function of its arguments that returns the number of samples"
    )


def share_of_samples(
    comm: ChainerCommunicator, label: str, count: Callable[[], int]
) -> float:
    """Return this rank's part of all ranks' samples. Collective.

    Args:
        comm: the ranks.
        label: names the operation in errors.
        count: returns this rank's number of samples, 0 or more.

    Raises:
        Exception: ``count`` fails on some rank; on all of them.
        ValueError: no rank has any.
    """
    try:
        n_samples = operator.index(count())
        if n_samples < 0:
            raise ValueError(f"count_samples returned {n_samples}")
    except Exception as error:
        comm.engine.agree(label, error=error)
        raise
    total = n_samples
    if comm.size > 1:
        comm.engine.agree(label)
        total = int(comm.allreduce(np.array(n_samples, np.int64)))
    if total == 0:
        raise ValueError(f"{label}: no rank has any")
    return n_samples / total


def warn_if_batch_exceeds_shard(
    comm: ChainerCommunicator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Warn on rank 0 if a batch holds samples of the local shard twice.

    Chainer's iterators then begin several epochs within one batch.

    Args:
        comm: knows the longest shard that was scattered through it.
        args: positional arguments of the loss function: the batch.
        kwargs: its keyword arguments.
    """
    if comm.rank != 0 or not comm.longest_shard:
        return
    lengths = [
        len(value)
        for value in itertools.chain(args, kwargs.values())
        if getattr(value, "ndim", 0) > 0
    ]
    if lengths and lengths[0] > comm.longest_shard:
        warnings.warn(
            f"the local batch has {lengths[0]} samples but the local shard only "
            f"{comm.longest_shard}: each step spans several epochs, and triggers "
            f"by epoch are skipped. Use a batch of at most {comm.longest_shard} "
            f"on each of the {comm.size} ranks",
            stacklevel=4,
        )


def warn_if_shards_differ(comm: ChainerCommunicator, longest: Sequence[int]) -> None:
    """Warn on rank 0 if the ranks are about to train on shards of different lengths.

    Their iterators begin new epochs in different iterations then, unless it is a
    :class:`~chainermn_ng.iterators.ShardIterator`.

    Args:
        comm: knows whether one was made with it.
        longest: the longest shard that each rank got through it; that of the training
            set, as the others are smaller.
    """
    if comm.rank != 0 or comm.has_shard_iterator or len(set(longest)) == 1:
        return
    warnings.warn(
        f"the ranks got shards of {min(longest)} to {max(longest)} samples. If these "
        "are for training, the ranks begin their epochs in different iterations and "
        "cannot stop together: iterate with chainermn_ng.iterators.ShardIterator, or "
        "scatter with force_equal_length=True",
        stacklevel=5,
    )
