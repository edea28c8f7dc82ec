"""What double buffering must do, done by hand in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer


def train_stale(
    optimizer: chainer.Optimizer,
    model: chainer.Link,
    steps: Sequence[Callable[[], Any]],
    *,
    between: Callable[[int], None] = lambda k: None,
    flushes: bool = False,
) -> chainer.Link:
    """Compute gradient k, then apply gradient k-1; the first step applies nothing.

    Args:
        optimizer: of Chainer, set up on the model.
        model: trained in place.
        steps: one loss function a step.
        between: called with k before step k, from 1.
        flushes: apply the last gradient too.
    """
    waiting: dict[str, Any] | None = None
    for k, loss in enumerate(steps, start=1):
        between(k)
        model.cleargrads()
        loss().backward()
        computed = {name: p.grad for name, p in model.namedparams()}
        if waiting is not None:
            apply(optimizer, model, waiting)
        waiting = computed
    if flushes and waiting is not None:
        apply(optimizer, model, waiting)
    return model


def apply(optimizer: chainer.Optimizer, model: chainer.Link, grads: Any) -> None:
    """Let the optimizer take a step with the given gradients."""
    for name, parameter in model.namedparams():
        parameter.grad = grads.get(name)
    optimizer.update()


class GradientRecorder:
    """An optimizer hook that notes the gradient of each step it sees.

    Args:
        path: of the parameter whose gradient's first element is noted.
    """

    name = "GradientRecorder"
    timing = "pre"

    def __init__(self, path: str) -> None:
        self._path = path
        self.seen: list[float] = []

    def __call__(self, optimizer: Any) -> None:
        grad = dict(optimizer.target.namedparams())[self._path].grad
        self.seen.append(float(grad.reshape(-1)[0]))
