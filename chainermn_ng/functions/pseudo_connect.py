"""Making the backward pass reach what no loss depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainer import backend


class PseudoConnect(chainer.FunctionNode):
    """Passes variables on, and zeros back to others.

    Args:
        n_delegates: how many of the inputs, the first ones, are only connected.
    """

    def __init__(self, n_delegates: int = 1) -> None:
        super().__init__()
        self._n_delegates = n_delegates

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the other inputs."""
        self._specs = [(x.shape, x.dtype) for x in inputs[: self._n_delegates]]
        self._device = backend.get_device_from_array(*inputs)
        return inputs[self._n_delegates :]

    def backward(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return zeros for the delegates, and the other gradients as they are."""
        with chainer.using_device(self._device):
            xp = self._device.xp
            zeros = [xp.zeros(shape, dtype) for shape, dtype in self._specs]
        return (*map(chainer.as_variable, zeros), *grad_outputs)


def pseudo_connect(
    delegate_variable: chainer.Variable | None, *actual_variables: Any
) -> tuple[chainer.Variable, ...]:
    """Return variables as they are, connected to one that they do not depend on.

    The backward pass from the results reaches ``delegate_variable`` too, with a
    gradient of zero. So what other ranks wait for gets its turn: give it what
    :func:`send` or :func:`gather` returned, or any result of communication that the
    loss of this rank does not depend on.

    Args:
        delegate_variable: what is to be reached; ``None`` connects nothing.
        actual_variables (chainer.Variable or ndarray): one or more.

    Returns:
        tuple of chainer.Variable: with the data and gradients of
        ``actual_variables``.

    Raises:
        ValueError: no actual variables.
    """
    delegates = [] if delegate_variable is None else [delegate_variable]
    return connect(delegates, actual_variables)


def connect(
    delegates: Sequence[chainer.Variable], actual_variables: Sequence[Any]
) -> tuple[chainer.Variable, ...]:
    """Do what :func:`pseudo_connect` does, for any number of delegates."""
    if not actual_variables:
        raise ValueError("pseudo_connect: expected one or more actual variables")
    variables = [chainer.as_variable(x) for x in actual_variables]
    device = variables[0].device
    near: list[Any] = [_on_device(x, device) for x in delegates]
    if not near:
        near = [variables[0].xp.empty(0, np.float32)]
    return PseudoConnect(len(near)).apply((*near, *variables))


def _on_device(variable: chainer.Variable, device: Any) -> chainer.Variable:
    if variable.device == device:
        return variable
    return chainer.functions.copy(variable, device)
