"""Differentiable communication against one process that holds all ranks' data.

A case computes each rank's outputs from each rank's input twice: by communication, a
rank at a time, and by Chainer alone on the inputs of all ranks together. The loss is
a weighted sum of squares of the outputs of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from chainermn_ng import functions

# For each rank the weight of each of its outputs; None: the output is not used.
Weights = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Case:
    """One function, in two forms.

    Attributes:
        shared: ``(comm, x, root)`` to this rank's outputs, and what to connect the
            loss with if it depends on none of them.
        joined: ``(xs, root)``, one variable a rank, to all ranks' outputs.
        rows: whether the input has a row for each rank.
    """

    shared: Callable[..., tuple[Sequence[Any], Any]]
    joined: Callable[..., Sequence[Sequence[Any]]]
    rows: bool = False


def _all_or_none(outputs: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    return outputs, outputs[0]


def _bcast(comm: Any, x: Any, root: int) -> tuple[Sequence[Any], Any]:
    return _all_or_none([functions.bcast(comm, x, root)])


def _gather(comm: Any, x: Any, root: int) -> tuple[Sequence[Any], Any]:
    got = functions.gather(comm, x, root)
    return _all_or_none(got) if comm.rank == root else ([], got)


def _chain(comm: Any, x: Any, root: int) -> tuple[Sequence[Any], Any]:
    """Each rank multiplies by what the rank before sent, and sends a pair on."""
    y, z = x, x
    if comm.rank > 0:
        y, z = functions.recv(comm, comm.rank - 1, tag=root)
        y = x * y
    if comm.rank == comm.size - 1:
        return [y, z], y
    delegate = functions.send((y, 3 * x), comm, comm.rank + 1, tag=root)
    # The delegate is part of the results, so that a loss reaches it.
    y, z = functions.pseudo_connect(delegate, y, z)
    return [y, z], y


def _joined_chain(xs: Sequence[Any], root: int) -> Sequence[Sequence[Any]]:
    outputs = [[xs[0], xs[0]]]
    for before, x in itertools.pairwise(xs):
        outputs.append([x * outputs[-1][0], 3 * before])
    return outputs


def _reduced(xs: Sequence[Any], op: str) -> Any:
    stacked = F.stack(xs)
    if op in ("max", "min"):
        return getattr(F, op)(stacked, axis=0)
    total = F.sum(stacked, axis=0)
    return total / len(xs) if op == "mean" else total


def _allreduce(op: str) -> Case:
    return Case(
        lambda comm, x, root: _all_or_none([functions.allreduce(comm, x, op)]),
        lambda xs, root: [[_reduced(xs, op)] for _ in xs],
    )


def _reduce_scatter(op: str) -> Case:
    return Case(
        lambda comm, x, root: _all_or_none([functions.reduce_scatter(comm, x, op)]),
        lambda xs, root: [[_reduced(xs, op)[r]] for r in range(len(xs))],
        rows=True,
    )


CASES = {
    "allgather": Case(
        lambda comm, x, root: _all_or_none(functions.allgather(comm, x)),
        lambda xs, root: [xs for _ in xs],
    ),
    "alltoall": Case(
        lambda comm, x, root: _all_or_none(
            functions.alltoall(comm, [x[i] for i in range(comm.size)])
        ),
        lambda xs, root: [[x[r] for x in xs] for r in range(len(xs))],
        rows=True,
    ),
    "bcast": Case(_bcast, lambda xs, root: [[xs[root]] for _ in xs]),
    "gather": Case(
        _gather, lambda xs, root: [xs if r == root else [] for r in range(len(xs))]
    ),
    "scatter": Case(
        lambda comm, x, root: _all_or_none([functions.scatter(comm, x, root)]),
        lambda xs, root: [[xs[root][r]] for r in range(len(xs))],
        rows=True,
    ),
    "send_recv": Case(_chain, _joined_chain),
    **{f"allreduce_{op}": _allreduce(op) for op in ("sum", "mean", "max", "min")},
    **{f"reduce_scatter_{op}": _reduce_scatter(op) for op in ("sum", "mean", "max")},
}


def inputs(case: Case, size: int, shape: tuple[int, ...], seed: int) -> list[Any]:
    """Return one float64 array a rank, no two values equal, the same on all ranks."""
    shape = (size, *shape) if case.rows else shape
    n_elems = size * int(np.prod(shape))
    order = np.random.RandomState(seed).permutation(n_elems).reshape(size, *shape)
    return [np.asarray(0.5 + x / max(n_elems, 1)) for x in order]


def loss_of(outputs: Sequence[Any], weights: Sequence[float | None]) -> Any:
    """Return one rank's loss, or ``None`` if it uses no output."""
    loss = None
    for y, weight in zip(outputs, weights, strict=False):
        if weight is not None:
            term = weight * F.sum(y * y)
            loss = term if loss is None else loss + term
    return loss


def shared_gradient(comm: Any, case: Case, x: Any, root: int, weights: Weights) -> Any:
    """Return the gradient of this rank's input, by communication."""
    variable = chainer.Variable(x)
    outputs, delegate = case.shared(comm, variable, root)
    loss = loss_of(outputs, weights[comm.rank])
    if loss is None:
        nothing = np.zeros((), x.dtype)
        (loss,) = functions.pseudo_connect(delegate, nothing)
    loss.backward()
    return variable.grad


def joined_gradient(
    case: Case, xs: Sequence[Any], rank: int, root: int, weights: Weights
) -> Any:
    """Return the numerical gradient of one rank's input, in one process.

    Central differences, which are exact for losses of second degree.
    """
    xs = [np.array(x) for x in xs]
    step = 1e-4

    def total() -> float:
        with chainer.no_backprop_mode():
            outputs = case.joined([chainer.Variable(x) for x in xs], root)
            losses = [loss_of(ys, w) for ys, w in zip(outputs, weights, strict=True)]
        return sum(float(loss.array) for loss in losses if loss is not None)

    x, grad = xs[rank], np.zeros_like(xs[rank])
    for index in np.ndindex(x.shape):
        value = x[index]
        x[index] = value + step
        above = total()
        x[index] = value - step
        grad[index] = (above - total()) / (2 * step)
        x[index] = value
    return grad
