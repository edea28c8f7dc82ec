"""The arrays of a Chainer model, in an order that is the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import chainer
import numpy as np
from chainer import variable
from chainer.backends import cuda


def named_parameters(model: chainer.Link) -> list[tuple[str, chainer.Parameter]]:
    """Return the model's parameters with their paths, sorted by path.

    A parameter that has several paths (weights shared between links) comes once,
    under the first of them.
    """
    seen = set()
    unique = []
    for name, parameter in sorted(model.namedparams(), key=itemgetter(0)):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            unique.append((name, parameter))
    return unique


def named_parameters_again(
    model: chainer.Link, before: list[tuple[str, chainer.Parameter]]
) -> list[tuple[str, chainer.Parameter]]:
    """Return :func:`named_parameters`, in half the time if they are the same as before.

    Args:
        model: whose parameters are asked for.
        before: what they were, not long ago.
    """
    known = {id(parameter) for _, parameter in before}
    is_same = known == {id(parameter) for parameter in model.params()}
    return before if is_same else named_parameters(model)


def initialised_parameters(model: chainer.Link) -> list[tuple[str, chainer.Parameter]]:
    """Return those that have a shape, each once, in no certain order.

    For what ranks do not have to do together: it takes half the time.
    """
    unique = {id(item[1]): item for item in model.namedparams(include_uninit=False)}
    return list(unique.values())


def named_persistents(model: chainer.Link) -> Iterator[tuple[str, chainer.Link, str]]:
    """Yield ``(path, link, attribute)`` of each persistent value, sorted by path.

    Persistent values are what a link saves beside its parameters, such as the
    running statistics of a batch normalization.
    """
    for path, link in sorted(model.namedlinks(), key=itemgetter(0)):
        for attribute in sorted(link._persistent):
            yield f"{path.rstrip('/')}/{attribute}", link, attribute


def gradient_of(parameter: chainer.Parameter) -> Any:
    """Return the gradient array, or ``None``; also of unusual memory layouts."""
    if parameter.layout is None:
        return parameter.grad
    with variable._AllowArrayAccessWithNonstandardLayout():
        return parameter.grad


def set_gradient(parameter: chainer.Parameter, grad: Any) -> None:
    """Set the gradient array; also of unusual memory layouts."""
    parameter._set_grad(grad, layout_check=False)


def to_host(value: Any) -> Any:
    """Return ``value``, with device arrays turned into NumPy arrays."""
    return cuda.to_cpu(value) if isinstance(value, cuda.ndarray) else value


def digest_of_array(array: Any) -> bytes:
    """Return 16 bytes that tell the array's values, shape and dtype apart."""
    host = to_host(array)
    head = f"{host.shape}{host.dtype.str}".encode()
    body = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(body.data)
    return digest.digest()
