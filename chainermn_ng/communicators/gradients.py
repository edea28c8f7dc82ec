"""The average of a model's gradients over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

import communicators
from chainermn_ng.communicators.parameters import (
    gradient_of,
    set_gradient,
)


def mean_gradients(
    engine: communicators.CommunicatorBase,
    parameters: Sequence[tuple[str, chainer.Parameter]],
    label: str,
    *,
    zero_fill: bool = False,
    loss_scale: float | None = None,
    share: float | None = None,
    groups: Sequence[int] | None = None,
) -> None:
    """Replace each gradient by its average over all ranks.

    Collective. A gradient that only some ranks have counts as zero on the others,
    which get the average too. Parameters that have no shape yet are left out; all
    ranks must leave out the same ones.

    Args:
        engine: the communicator.
        parameters: of a model, with their paths, in an order equal on all ranks (see
            :func:`named_parameters`); their gradients are averaged in place, in
            their own dtype and memory layout.
        label: says to the ranks' agreement which gradients these are.
        zero_fill: give a gradient of zeros to the parameters for which no rank has
            one; by default it stays ``None``.
        loss_scale: by what the loss was multiplied before the backward pass, for
            the gradients that this rank lacks. By default what the other parameters
            of this rank say.
        share: this rank's part of the total, between 0 and 1; the parts of all
            ranks add up to 1. By default all ranks have equal parts.
        groups: lengths of groups of parameters that share no bucket; see
            :meth:`communicators.CommunicatorBase.allreduce_arrays`. All are
            initialised then.

    Raises:
        MismatchError: parameters, shapes, dtypes or the label differ between ranks;
            raised on all of them, nothing is changed.
    """
    parameters = [item for item in parameters if item[1].is_initialized]
    try:
        grads = own_gradients(parameters)
        if share == 0:
            # The mean over no samples is NaN; with no part in the total it is zero.
            grads = [None] * len(grads)
            for _, parameter in parameters:
                set_gradient(parameter, None)
        elif share is not None:
            scale_to_share(grads, share)
    except (RuntimeError, TypeError, ValueError) as error:
        engine.agree(label, error=error)
        raise
    entries = [
        communicators.ArraySpec.of(p.raw_array) if grad is None else grad
        for (_, p), grad in zip(parameters, grads, strict=True)
    ]
    results = engine.allreduce_arrays(
        entries,
        op="mean" if share is None else "sum",
        names=[name for name, _ in parameters],
        label=label,
        groups=groups,
    )
    if loss_scale is None:
        loss_scale = loss_scale_of_gradients(parameters, grads)
    for (_, parameter), grad, result in zip(parameters, grads, results, strict=True):
        if grad is not None:
            continue
        if result is not None:
            set_gradient(parameter, _on_device(parameter, result))
        elif zero_fill:
            set_gradient(parameter, parameter.xp.zeros_like(parameter.raw_array))
        else:
            continue
        # Chainer divides each gradient by the scale noted beside it, which its
        # backward pass notes only where it computed one.
        parameter._loss_scale = loss_scale


def keep_gradients(
    parameters: Sequence[tuple[str, chainer.Parameter]],
    *,
    zero_fill: bool,
    loss_scale: float | None,
) -> None:
    """Leave gradients as :func:`mean_gradients` leaves them where there is one rank.

    Not collective. Each is its own average already.

    Args:
        parameters: initialised ones with their paths, in any order.
        zero_fill: as in :func:`mean_gradients`.
        loss_scale: as there.
    """
    # Hooks and loss scaling write to gradients, which must not share memory then.
    grads = own_gradients(parameters)
    if not zero_fill:
        return
    for (_, parameter), grad in zip(parameters, grads, strict=True):
        if grad is None:
            set_gradient(parameter, parameter.xp.zeros_like(parameter.raw_array))
            parameter._loss_scale = loss_scale


def own_gradients(parameters: Sequence[tuple[str, chainer.Parameter]]) -> list[Any]:
    """Return the gradients, ``None`` where there is none, each in memory of its own.

    Those that share memory, or cannot be written to, are replaced by copies in their
    parameters as well.
    """
    taken: set[int] = set()
    grads: list[Any] = []
    for _, parameter in parameters:
        grad = gradient_of(parameter)
        if grad is not None:
            owned = _in_memory_of_its_own(grad, taken)
            if owned is not grad:
                set_gradient(parameter, owned)
                grad = owned
        grads.append(grad)
    return grads


def scale_to_share(grads: Sequence[Any], share: float) -> None:
    """Multiply gradients by this rank's part of the total, in place."""
    for grad in grads:
        if grad is not None:
            # A share rounded to half precision would be off by up to 5e-4.
            wide = np.promote_types(grad.dtype, np.float32).type(share)
            grad[...] = grad * wide


def _in_memory_of_its_own(grad: Any, taken: set[int]) -> Any:
    """Copy ``grad`` if writing to it would change another gradient, or is impossible.

    Chainer's backward pass hands one array to both inputs of a sum, and read-only
    views that repeat one element to the input of a reduction.
    """
    memory = id(grad if grad.base is None else grad.base)
    repeats = 0 in grad.strides and grad.size > 1
    writeable = getattr(grad.flags, "writeable", True)
    if memory in taken or repeats or not writeable:
        grad = grad.copy()
        memory = id(grad)
    taken.add(memory)
    return grad


def _on_device(parameter: chainer.Parameter, array: Any) -> Any:
    return parameter.device.send(array)


def loss_scale_of_gradients(
    parameters: Sequence[tuple[str, chainer.Parameter]], grads: list[Any]
) -> float | None:
    """Return the scale noted beside the first gradient that this rank has."""
    for (_, parameter), grad in zip(parameters, grads, strict=True):
        if grad is not None:
            return parameter._loss_scale
    return parameters[0][1]._loss_scale if parameters else None
