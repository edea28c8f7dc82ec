"""Making optimizers that work on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import chainer

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.optimizers.double_buffering import DoubleBufferingOptimizer
from chainermn_ng.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn_ng.optimizers.overlap_plan import Planner


def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: ChainerCommunicator,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    count_samples: Callable[..., int] | None = None,
    overlap: bool | str = "auto",
    overlap_bytes: int | None = None,
) -> MultiNodeOptimizer:
    """Make a Chainer optimizer work on all ranks together. Not collective itself.

    All ranks must create the same optimizers in the same order: they are numbered,
    so that a rank that skips a step of one is found and named.

    Args:
        actual_optimizer: any Chainer optimizer.
        communicator: made by :func:`chainermn_ng.create_communicator`.
        double_buffering: average each gradient in the background while the next one
            is computed, and apply it one update later: communication costs little
            time then, but gradients are one step old, which can cost accuracy. Call
            ``flush()`` after the last update. See :class:`DoubleBufferingOptimizer`.
        zero_fill: give a gradient of zeros to initialised parameters for which no
            rank has a gradient; Chainer's own optimizers do that anyway. A gradient
            that only some ranks lack always counts as zero.
        count_samples: by default all ranks weigh the same, whatever their batches.
            With a function of the loss function's arguments that returns the number
            of samples in this rank's batch, the step is that of one process on all
            of them, for a loss that is a mean over samples. For batches of a
            :class:`~chainermn_ng.iterators.ShardIterator` it is the iterator's
            ``count_samples``, for others of different lengths
            :func:`~chainermn_ng.optimizers.count_first_argument`. It costs one small
            all-reduce a step. In a loop of one's own pass the batch as
            ``optimizer.update(None, *batch)``. In a model whose forward pass is
            collective (:class:`~chainermn_ng.links.MultiNodeBatchNormalization`)
            ranks without samples run the loss function, too.
        overlap: average gradients while ``update`` still computes others, without
            changing any bit of the result: ``True``, ``False``, or ``"auto"`` for where
            it can help. Only for an ``update`` with a loss function; needs an MPI
            library with ``MPI_THREAD_MULTIPLE``. See ``docs/source/overlap.md``.
        overlap_bytes: gradients travel in groups of at most this size, overlap or not;
            by default 1/24 of all, but at least 1 MiB and at most 16 MiB. Must be the
            same on all ranks.

    Returns:
        MultiNodeOptimizer: a stand-in for ``actual_optimizer``; with double buffering
        a :class:`DoubleBufferingOptimizer`.

    Raises:
        TypeError: ``communicator`` takes no models, or there is no optimizer.
        ValueError: ``overlap`` or ``overlap_bytes`` is out of range, or there is to be
            both overlap and double buffering.
    """
    if not isinstance(communicator, ChainerCommunicator):
        raise TypeError(
            "create_multi_node_optimizer: expected a communicator made by "
            "chainermn_ng.create_communicator; got "
            f"{type(communicator).__module__}.{type(communicator).__qualname__}"
        )
    if not isinstance(actual_optimizer, chainer.Optimizer):
        raise TypeError(
            "create_multi_node_optimizer: expected a chainer.Optimizer; got "
            f"{type(actual_optimizer).__qualname__}"
        )
    planner = Planner(overlap, overlap_bytes)
    if not double_buffering:
        return MultiNodeOptimizer(
            actual_optimizer, communicator, zero_fill, count_samples, planner
        )
    if overlap is True:
        raise ValueError(
            "create_multi_node_optimizer: overlap=True and double_buffering=True "
            "exclude each other: double buffering averages a gradient during the whole "
            "of the next step. Leave one of them out"
        )
    return DoubleBufferingOptimizer(
        actual_optimizer, communicator, zero_fill, count_samples
    )
