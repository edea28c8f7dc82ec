"""A batch normalization link whose statistics are those of all ranks' batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import chainer.links as L

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.functions.batch_normalization import (
    SumOverRanks,
    check_communication_backend,
    multi_node_batch_normalization,
)
from chainermn_ng.uncounted import is_uncounted


class MultiNodeBatchNormalization(L.BatchNormalization):
    """Batch normalization over the joined batch of all ranks.

    Outputs, gradients and running statistics are those of
    :class:`chainer.links.BatchNormalization` in one process on the batches of all
    ranks together, also if these are of different lengths or some are empty. Mean and
    variance are computed in float32 at least.

    In training mode the forward pass is collective, and so is the backward pass: all
    ranks run the same layers in the same order. In test mode nothing is sent. Copies
    share the communicator. A snapshot of :class:`chainer.links.BatchNormalization`
    can be loaded, and the other way round.

    Args:
        size: shape of the channel dimensions; ``None`` with ``axis``: taken from the
            first batch.
        comm: communicator made by :func:`chainermn_ng.create_communicator`.
        decay: part of the running statistics that is kept at each step.
        eps: added to the variance.
        dtype: of parameters and running statistics.
        use_gamma: whether there is a scale.
        use_beta: whether there is a shift.
        initial_gamma: initializer of the scale; ``None`` for 1.
        initial_beta: initializer of the shift; ``None`` for 0.
        communication_backend: ``"auto"`` sends statistics of GPU arrays by NCCL and
            of NumPy arrays by MPI; ``"mpi"`` sends all by MPI; ``"nccl"`` refuses
            NumPy arrays and communicators without NCCL.
        axis: axes over which is normalized, ascending; ``None`` for all but the
            channel's.
        initial_avg_mean: initializer of the running mean; ``None`` for 0.
        initial_avg_var: initializer of the running variance; ``None`` for 1, as in
            Chainer (ChainerMN: 0).

    Attributes:
        comm (ChainerCommunicator): whose ranks take part.
        meets_other_ranks (bool): says to the optimizer that all ranks run this link,
            also those without samples.

    Raises:
        TypeError: ``comm`` is no such communicator.
        ValueError: ``communication_backend`` is unknown, or ``comm`` does not have it.
        RuntimeError: neither size nor axis.
    """

    meets_other_ranks = True

    def __init__(
        self,
        size: int | tuple[int, ...] | None,
        comm: ChainerCommunicator,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
        communication_backend: str = "auto",
        *,
        axis: int | tuple[int, ...] | None = None,
        initial_avg_mean: Any = None,
        initial_avg_var: Any = None,
    ) -> None:
        check_communication_backend(comm, communication_backend)
        super().__init__(
            size,
            decay,
            eps,
            dtype,
            use_gamma,
            use_beta,
            initial_gamma,
            initial_beta,
            axis,
            initial_avg_mean,
            initial_avg_var,
        )
        self.comm = comm
        self._communication_backend = communication_backend

    @classmethod
    def from_link(
        cls,
        state: dict[str, Any],
        comm: ChainerCommunicator,
        communication_backend: str = "auto",
    ) -> MultiNodeBatchNormalization:
        """Make one that takes over all that a plain link of Chainer's holds.

        Args:
            state: attributes of a :class:`chainer.links.BatchNormalization`, the
                link's own from now on.
            comm: as in the constructor.
            communication_backend: likewise.
        """
        check_communication_backend(comm, communication_backend)
        link = cls.__new__(cls)
        vars(link).update(state)
        link.comm = comm
        link._communication_backend = communication_backend
        return link

    @property
    def printable_specs(self) -> Iterator[tuple[str, Any]]:
        """Names and values of the constructor's arguments, for ``str``."""
        # Chainer's asks a link without a size for it.
        yield "size", None if self.avg_mean is None else self.avg_mean.shape
        yield "comm", self.comm.name
        yield "decay", self.decay
        yield "eps", self.eps
        yield "dtype", self._highprec_dtype
        yield "use_gamma", self.gamma is not None
        yield "use_beta", self.beta is not None
        yield "axis", self.axis

    def forward(self, x: Any, finetune: bool = False) -> chainer.Variable:
        """Normalize a batch. Collective in training mode.

        In a step in which this rank's batch does not count, its samples are left out of
        the statistics and normalized with the running ones.

        Args:
            x: this rank's part of the batch.
            finetune: in training mode, average the statistics over all batches since
                :meth:`start_finetuning` instead of forgetting the old ones.

        Raises:
            Exception: the input does not fit, on some rank; on all of them.
        """
        if not chainer.config.train:
            return super().forward(x)
        self._initialize_from(x)
        decay = self.decay
        running = self.avg_mean, self.avg_var
        if chainer.config.in_recomputing:
            running = None, None
        elif finetune:
            self.N += 1
            decay = 1.0 - 1.0 / self.N
        axis = 0 if self.axis is None else self.axis[0]
        is_left_out = is_uncounted() and getattr(x, "ndim", 0) > axis
        counted = x[(slice(None),) * axis + (slice(0),)] if is_left_out else x
        y = multi_node_batch_normalization(
            counted,
            self._get_gamma()[0] if self.gamma is None else self.gamma,
            self._get_beta()[0] if self.beta is None else self.beta,
            SumOverRanks(self.comm, self._communication_backend),
            eps=self.eps,
            running_mean=running[0],
            running_var=running[1],
            decay=decay,
            axis=self.axis,
        )
        if not is_left_out:
            return y
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            rest = super().forward(x)
        # The backward pass goes through the joint normalization, with no samples.
        return chainer.functions.concat([y, rest.array], axis)

    def _initialize_from(self, x: Any) -> None:
        if self.avg_mean is None:
            shape = tuple(n for i, n in enumerate(x.shape) if i not in self.axis)
            self._initialize_params(shape)

    def _initialize_params(self, shape: int | tuple[int, ...]) -> None:
        # Chainer's also draws values anew that a snapshot or another rank has brought.
        kept = {
            name: getattr(self, name)
            for name in ("gamma", "beta")
            if getattr(self, name) is not None and getattr(self, name).is_initialized
        }
        for name in kept:
            vars(self)[name] = None
        super()._initialize_params(shape)
        vars(self).update(kept)
