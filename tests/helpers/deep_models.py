"""Models whose gradients make several groups, and trainings to compare them by."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainermn_ng.optimizers import create_multi_node_optimizer
from helpers.chainer_models import part

#: Makes groups of one to four of a ``Deep`` model's arrays.
SMALL_GROUPS = 256


class Deep(chainer.Chain):
    """Layers with a few things that make gradients of one step depend on each other.

    Args:
        seed: decides on the initial weights.
        is_lazy: let the first pass give the first layer its shape.
    """

    def __init__(self, seed: int = 0, is_lazy: bool = False) -> None:
        super().__init__()
        random = np.random.RandomState(seed)

        def normal(*shape: int) -> Any:
            return random.normal(size=shape).astype("f")

        with self.init_scope():
            self.l1 = L.Linear(None if is_lazy else 5, 8, initialW=normal(8, 5))
            self.l2 = L.Linear(8, 8, initialW=normal(8, 8))
            self.l3 = L.Linear(8, 8, initialW=normal(8, 8))
            self.l4 = L.Linear(8, 8, initialW=normal(8, 8))
            self.l5 = L.Linear(8, 3, initialW=normal(3, 8))
            # Both get the gradient of their sum, which is one array.
            self.v = chainer.Parameter(normal(8))
            self.w = chainer.Parameter(normal(8))
            self.unused = chainer.Parameter(normal(4))
        # Two links, one parameter.
        self.l4.W = self.l3.W

    def top(self, h: Any) -> Any:
        """Return the scores for the second layer's output."""
        h = h + F.broadcast_to(self.v + self.w, h.shape)
        h = F.tanh(self.l4(F.tanh(self.l3(h)))) + F.broadcast_to(self.v, h.shape)
        return self.l5(h)

    def forward(self, x: Any, t: Any) -> Any:
        """Return the loss; its graph runs through the second layer twice."""
        h = F.tanh(self.l2(F.tanh(self.l2(F.tanh(self.l1(x))))))
        return F.softmax_cross_entropy(self.top(h), t)


def trained(
    comm: Any,
    data: list[Any],
    *,
    model: Any = None,
    loss: Any = None,
    actual: Any = None,
    hooks: Any = (),
    **options: Any,
) -> Any:
    """Train on this rank's parts of the batches; return the optimizer."""
    model = Deep(comm.rank) if model is None else model
    actual = chainer.optimizers.MomentumSGD(0.05) if actual is None else actual
    options = {"overlap_bytes": SMALL_GROUPS, **options}
    optimizer = create_multi_node_optimizer(actual, comm, **options).setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    for batch in data:
        optimizer.update(loss or model, *part(comm, batch))
    return optimizer


def bits(optimizer: Any) -> Any:
    """Return all that a training leaves, to be compared bit by bit."""
    state = [
        (name, None if p.array is None else p.array.tobytes(), _bytes(p.grad))
        for name, p in sorted(optimizer.target.namedparams())
        if p.is_initialized
    ]
    return optimizer.t, state


def _bytes(array: Any) -> bytes | None:
    return None if array is None else array.tobytes()
