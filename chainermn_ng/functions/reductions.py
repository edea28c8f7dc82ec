"""Reductions over all ranks that gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
from chainer import backend

import communicators
from chainermn_ng.functions.collective_communication import CollectiveNode
from chainermn_ng.functions.communication_node import engine_of
from communicators.dtypes import accumulation_dtype

#: Reductions that have a gradient here.
OPS = ("sum", "mean", "max", "min")


class ReductionNode(CollectiveNode):
    """A reduction by ``op``."""

    def __init__(self, engine: communicators.CommunicatorBase, op: Any) -> None:
        super().__init__(engine)
        self.op = op

    @property
    def picks(self) -> bool:
        """Whether the result is one of the inputs, so that only that one counts."""
        return self.op in ("max", "min")

    def details(self) -> str:
        """Return what else must be the same on all ranks."""
        return f"op={self.op}, {super().details()}"

    def prepare(self, inputs: Sequence[Any]) -> list[chainer.Variable]:
        """Check this rank's input, and the operation."""
        if self.op not in OPS:
            raise ValueError(
                f"{self.label}: op {self.op!r} has no gradient here; known: "
                f"{', '.join(OPS)}. For prod, multiply the results of allgather"
            )
        variables = super().prepare(inputs)
        if variables[0].dtype.kind != "f":
            raise TypeError(
                f"{self.label}: dtype {variables[0].dtype} has no gradient; expected "
                f"a floating one. comm.{self.function} reduces arrays of any dtype"
            )
        return variables

    def retain(self) -> None:
        """Keep what the backward pass needs."""
        if self.picks:
            self.retain_inputs((0,))
            self.retain_outputs((0,))


class AllReduce(ReductionNode):
    """See :func:`allreduce`."""

    function = "allreduce"

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Reduce over all ranks."""
        self.retain()
        return (self.engine.allreduce(inputs[0], self.op),)

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Reduce the gradients alike."""
        total = self.engine.allreduce(grads[0], "mean" if self.op == "mean" else "sum")
        if not self.picks:
            return [total]
        x = self.get_retained_inputs()[0].array
        y = self.get_retained_outputs()[0].array
        return [_where_equal(x, y, total)]


class ReduceScatter(ReductionNode):
    """See :func:`reduce_scatter`."""

    function = "reduce_scatter"

    def prepare(self, inputs: Sequence[Any]) -> list[chainer.Variable]:
        """Check this rank's input, and its rows."""
        variables = super().prepare(inputs)
        shape = variables[0].shape
        if shape[:1] != (self.engine.size,):
            raise ValueError(
                f"{self.label}: shape {shape}; expected {self.engine.size} rows, one "
                "block per rank"
            )
        return variables

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Reduce over all ranks and keep this rank's block."""
        self.retain()
        return (self.engine.reduce_scatter(inputs[0], self.op),)

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Collect the gradients of all blocks."""
        xp = backend.get_array_module(grads[0])
        if not self.picks:
            blocks = xp.stack(self.engine.allgather(grads[0]))
            if self.op == "sum":
                return [blocks]
            wide = blocks.astype(accumulation_dtype(blocks.dtype))
            return [(wide / self.engine.size).astype(blocks.dtype)]
        y = self.get_retained_outputs()[0].array
        pairs = self.engine.allgather((grads[0], y))
        blocks = xp.stack([gy for gy, _ in pairs])
        results = xp.stack([result for _, result in pairs])
        x = self.get_retained_inputs()[0].array
        return [_where_equal(x, results, blocks)]


def allreduce(comm: Any, x: Any, op: str = "sum") -> chainer.Variable:
    """Reduce a variable over all ranks. Collective.

    With the losses of all ranks together as the loss, the gradient of a sum is the
    sum of the ranks' gradients, that of a mean their mean; that of a maximum or
    minimum their sum, wherever this rank's value is the result (with several such
    ranks each gets it, as in :func:`chainer.functions.max`).

    Args:
        comm: communicator, of this package or of the engine.
        x (chainer.Variable or ndarray): same shape and floating dtype on all ranks.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        chainer.Variable: of the same shape and dtype, the same bits on all ranks.
        Half precision is summed in float32, forward and backward.

    Raises:
        ValueError: another op; on all ranks.
        TypeError: no array, or an integer one, which has no gradient; on all ranks.
        MismatchError: shapes, dtypes or ops differ, the ranks call different
            functions, or only some keep a graph; on all ranks.
    """
    return AllReduce(engine_of(comm, "functions.allreduce"), op).call(lambda: [x])[0]


def reduce_scatter(comm: Any, x: Any, op: str = "sum") -> chainer.Variable:
    """Reduce equal blocks over all ranks and keep this rank's block. Collective.

    Args:
        comm: communicator, of this package or of the engine.
        x (chainer.Variable or ndarray): shape ``(size, *block)``, the same shape and
            floating dtype on all ranks.
        op: as in :func:`allreduce`, as are the gradients.

    Returns:
        chainer.Variable: shape ``block``, same dtype.

    Raises:
        ValueError: another op or number of rows; on all ranks.
        TypeError, MismatchError: as in :func:`allreduce`.
    """
    return ReduceScatter(engine_of(comm, "functions.reduce_scatter"), op).call(
        lambda: [x]
    )[0]


def _where_equal(x: Any, y: Any, grad: Any) -> Any:
    xp = backend.get_array_module(x)
    return xp.where(x == y, grad, xp.zeros_like(grad))
