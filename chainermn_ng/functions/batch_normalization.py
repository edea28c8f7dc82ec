"""Batch normalization over the joined batch of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np
from chainer import backend, function_node
from chainer.backends import cuda
from chainer.functions.normalization import batch_normalization as chainer_bn

from chainermn_ng.communicators import ChainerCommunicator
from communicators.devices.host import nccl_takes_host_memory

#: Values of ``communication_backend``.
BACKENDS = ("auto", "mpi", "nccl")


def check_communication_backend(comm: Any, communication_backend: str) -> None:
    """Refuse a way of communication that a communicator does not have.

    Args:
        comm: the communicator of the link.
        communication_backend: see :class:`SumOverRanks`.

    Raises:
        TypeError: ``comm`` was not made by ``chainermn_ng.create_communicator``.
        ValueError: an unknown name, or ``"nccl"`` where there is none over all ranks.
    """
    if not isinstance(comm, ChainerCommunicator):
        raise TypeError(
            "multi-node batch normalization: expected a communicator made by "
            "chainermn_ng.create_communicator; got "
            f"{type(comm).__module__}.{type(comm).__qualname__}"
        )
    if communication_backend not in BACKENDS:
        raise ValueError(
            f"communication_backend {communication_backend!r}: expected one of "
            f"{', '.join(map(repr, BACKENDS))}"
        )
    engine = comm.engine
    has_nccl = "gpu" in engine.device_types and engine.nccl_spans_hosts
    if communication_backend == "nccl" and not has_nccl:
        raise ValueError(
            "communication_backend 'nccl': the communicator "
            f"{comm.name!r} has no NCCL over all ranks; use 'auto'"
        )


class SumOverRanks:
    """Sums small arrays over all ranks, in float64 and in one message.

    Args:
        comm: whose ranks take part.
        communication_backend: ``"auto"`` sends GPU arrays by NCCL and NumPy arrays by
            MPI; ``"mpi"`` sends all by MPI, through host memory; ``"nccl"`` refuses
            NumPy arrays.
    """

    def __init__(self, comm: ChainerCommunicator, communication_backend: str) -> None:
        check_communication_backend(comm, communication_backend)
        self.comm = comm
        self.communication_backend = communication_backend

    def check_array(self, x: Any) -> None:
        """Refuse arrays that ``communication_backend`` does not allow.

        Raises:
            TypeError: a NumPy array for ``"nccl"``.
        """
        is_host = isinstance(x, np.ndarray) and not nccl_takes_host_memory()
        if self.communication_backend == "nccl" and is_host:
            raise TypeError(
                "communication_backend 'nccl': the input is a NumPy array, which NCCL "
                "does not take; move the model to a GPU, or use 'auto'"
            )

    def __call__(self, *arrays: Any) -> list[Any]:
        """Return the sums, float64, on the device of the arrays. Collective."""
        xp = backend.get_array_module(*arrays)
        flat = xp.concatenate([a.reshape(-1).astype(np.float64) for a in arrays])
        if self.communication_backend == "mpi" and xp is not np:
            flat = xp.asarray(self.comm.allreduce(cuda.to_cpu(flat)))
        else:
            flat = self.comm.allreduce(flat)
        sums, begin = [], 0
        for array in arrays:
            sums.append(flat[begin : begin + array.size].reshape(array.shape))
            begin += array.size
        return sums


@dataclass
class BatchStatistics:
    """What the forward pass leaves for the backward passes.

    Attributes:
        axis: axes over which is normalized.
        expander: index that gives statistics the dimensions of the input.
        sum_over_ranks: how the ranks add up.
        count: float64 array without dimensions: elements of the joined batch per
            statistic, at least 1.
        mean: of the joined batch, in the dtype of computation.
        inv_std: one over the standard deviation of the joined batch, likewise.
    """

    axis: tuple[int, ...]
    expander: tuple[Any, ...]
    sum_over_ranks: SumOverRanks
    count: Any = None
    mean: Any = None
    inv_std: Any = None

    def expand(self, statistic: Any) -> Any:
        """Return a statistic with the dimensions of the input, in its own dtype."""
        return statistic.astype(self.mean.dtype, copy=False)[self.expander]

    def normalize(self, x: Any) -> Any:
        """Return the input less the mean, over the standard deviation."""
        return (x - self.expand(self.mean)) * self.expand(self.inv_std)

    def sum(self, x: Any) -> Any:
        """Return the sums of this rank's elements, in float64."""
        return x.sum(axis=self.axis, dtype=np.float64)


def multi_node_batch_normalization(
    x: Any,
    gamma: Any,
    beta: Any,
    sum_over_ranks: SumOverRanks,
    *,
    eps: float = 2e-5,
    running_mean: Any = None,
    running_var: Any = None,
    decay: float = 0.9,
    axis: tuple[int, ...] | None = None,
) -> chainer.Variable:
    """Normalize with mean and variance of the batches of all ranks. Collective.

    Like :func:`chainer.functions.batch_normalization` on the joined batch. The ranks'
    batches may differ in the lengths of the axes over which is normalized; a rank
    may have none at all.

    The backward pass is collective as well. The gradient of ``x`` is that of the sum
    of all ranks' losses; those of ``gamma`` and ``beta`` are this rank's parts of
    it, to be added up or averaged like all gradients of parameters. It can be
    differentiated once more.

    Args:
        x: shape as Chainer's; half precision is computed in float32.
        gamma: scale, in the shape of the axes that are left.
        beta: shift, likewise.
        sum_over_ranks: whose ranks take part.
        eps: added to the variance.
        running_mean: updated in place; ``None`` for no such update.
        running_var: likewise, with the variance's unbiased estimate.
        decay: part of the running statistics that is kept.
        axis: axes over which is normalized, ascending; ``None`` for all but the
            channel's.

    Returns:
        chainer.Variable: shape and dtype of ``x``.

    Raises:
        Exception: an argument does not fit, on some rank: on all of them; there as
            it is, elsewhere as TypeError, ValueError or RankFailedError.
    """
    try:
        inputs = [chainer.as_variable(value) for value in (x, gamma, beta)]
        axis = _checked_axis(inputs, axis)
        sum_over_ranks.check_array(inputs[0].array)
    except (TypeError, ValueError) as error:
        # The others are on their way into the sum; they learn why it fails.
        sum_over_ranks.comm.engine.agree("multi-node batch normalization", error=error)
        raise
    expander = tuple(None if i in axis else slice(None) for i in range(inputs[0].ndim))
    statistics = BatchStatistics(axis, expander, sum_over_ranks)
    function = _Normalization(statistics, eps, running_mean, running_var, decay)
    return function.apply(inputs)[0]


def _checked_axis(
    inputs: list[chainer.Variable], axis: tuple[int, ...] | None
) -> tuple[int, ...]:
    x, gamma, beta = inputs
    what = "multi-node batch normalization"
    if x.dtype.kind != "f":
        raise TypeError(f"{what}: input of dtype {x.dtype}; expected floating numbers")
    if axis is None:
        axis = (0, *range(gamma.ndim + 1, x.ndim))
    if list(axis) != sorted({i for i in axis if 0 <= i < x.ndim}):
        raise ValueError(
            f"{what}: axis {axis}: expected different numbers from 0 to {x.ndim - 1}, "
            "in ascending order"
        )
    kept = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    if not kept == gamma.shape == beta.shape:
        raise ValueError(
            f"{what} over axis {axis}: the input of shape {x.shape} leaves {kept}; "
            f"gamma has {gamma.shape}, beta {beta.shape}"
        )
    return axis


class _Normalization(function_node.FunctionNode):
    # Its backward pass is collective; so is that of its gradient.
    meets_other_ranks = True

    def __init__(
        self,
        statistics: BatchStatistics,
        eps: float,
        running_mean: Any,
        running_var: Any,
        decay: float,
    ) -> None:
        self._statistics = statistics
        self._eps = eps
        self._running = running_mean, running_var
        self._decay = decay

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs
        xp = backend.get_array_module(x)
        s = self._statistics
        n_here = xp.full((), int(np.prod([x.shape[i] for i in s.axis])), np.float64)
        total, n_all = s.sum_over_ranks(s.sum(x), n_here)
        s.count = xp.maximum(n_all, 1)
        dtype = np.promote_types(np.promote_types(x.dtype, gamma.dtype), np.float32)
        s.mean = (total / s.count).astype(dtype)
        # The squares of what is left of the common mean: the difference of the mean
        # square and the squared mean would lose all digits where the mean is large.
        (squares,) = s.sum_over_ranks(s.sum(xp.square(x - s.expand(s.mean))))
        s.inv_std = (1 / xp.sqrt(squares / s.count + self._eps)).astype(dtype)
        self._update_running(xp, n_all, squares)
        return (
            chainer_bn._apply_bn_fwd(
                xp, x, *map(s.expand, (s.mean, s.inv_std, gamma, beta))
            ),
        )

    def _update_running(self, xp: Any, n_all: Any, squares: Any) -> None:
        # Over no samples at all there are no statistics, and the old ones stay.
        decay = xp.where(n_all > 0, self._decay, 1.0)
        unbiased = squares / xp.maximum(n_all - 1, 1)
        for running, new in zip(
            self._running, (self._statistics.mean, unbiased), strict=True
        ):
            if running is not None:
                running[...] = decay * running + (1 - decay) * new

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        x, gamma = self.get_retained_inputs()
        return _NormalizationGrad(self._statistics).apply((x, gamma, *grad_outputs))


class _NormalizationGrad(function_node.FunctionNode):
    """From ``x, gamma, gy`` to the gradients of ``x``, ``gamma`` and ``beta``."""

    meets_other_ranks = True

    def __init__(self, statistics: BatchStatistics) -> None:
        self._statistics = statistics

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.retain_inputs((0, 1, 2))
        x, gamma, gy = inputs
        s = self._statistics
        x_hat = s.normalize(x)
        here = s.sum(gy * x_hat), s.sum(gy)
        self._means = [total / s.count for total in s.sum_over_ranks(*here)]
        gx = s.expand(gamma * s.inv_std) * (
            gy - x_hat * s.expand(self._means[0]) - s.expand(self._means[1])
        )
        return gx.astype(x.dtype, copy=False), *(g.astype(gamma.dtype) for g in here)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        inputs = self.get_retained_inputs()
        xp = backend.get_array_module(inputs[0].array)
        x, gamma, _ = inputs
        grads = [
            xp.zeros(like.shape, like.dtype) if grad is None else grad
            for grad, like in zip(grad_outputs, (x, gamma, gamma), strict=True)
        ]
        function = _NormalizationGradGrad(self._statistics, self._means)
        return function.apply((*inputs, *grads))


class _NormalizationGradGrad(function_node.FunctionNode):
    """Gradients of what :class:`_NormalizationGrad` returns; cannot go on.

    Args:
        statistics: of the forward pass.
        means: gradients of gamma and beta over all ranks, divided by the count.
    """

    def __init__(self, statistics: BatchStatistics, means: list[Any]) -> None:
        self._statistics = statistics
        self._means = means

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, gamma, gy, ggx, gggamma, ggbeta = inputs
        s = self._statistics
        x_hat = s.normalize(x)
        scale = gamma * s.inv_std
        here = s.sum(ggx * x_hat), s.sum(ggx)
        mean_ggx_x, mean_ggx = (total / s.count for total in s.sum_over_ranks(*here))
        # The sums of gy * x_hat and of gy are outputs, and terms of ``gx``.
        by_ggamma = gggamma - scale * mean_ggx_x
        by_gbeta = ggbeta - scale * mean_ggx
        # ``gx`` is the scale times this; then the derivative by x_hat alone.
        core = gy - x_hat * s.expand(self._means[0]) - s.expand(self._means[1])
        by_scale = s.sum(ggx * core)
        by_x_hat = s.expand(by_ggamma) * gy - s.expand(scale * self._means[0]) * ggx
        # Mean and deviation within x_hat and the scale depend on every rank's input.
        here = s.sum(by_x_hat * x_hat) + scale * by_scale, s.sum(by_x_hat)
        by_inv_std, by_mean = (total / s.count for total in s.sum_over_ranks(*here))
        gx = s.expand(s.inv_std) * (
            by_x_hat - x_hat * s.expand(by_inv_std) - s.expand(by_mean)
        )
        ggy = s.expand(scale) * ggx + s.expand(by_ggamma) * x_hat + s.expand(by_gbeta)
        return (
            gx.astype(x.dtype, copy=False),
            (s.inv_std * by_scale).astype(gamma.dtype),
            ggy.astype(gy.dtype, copy=False),
        )
