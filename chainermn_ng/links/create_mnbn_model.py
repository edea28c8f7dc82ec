"""Turning a model's batch normalizations into ones over the batches of all ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import chainer
import chainer.links as L

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.functions.batch_normalization import check_communication_backend
from chainermn_ng.links.batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(
    link: chainer.Link, comm: ChainerCommunicator, communication_backend: str = "auto"
) -> chainer.Link:
    """Return a copy of a model with batch normalization over all ranks' batches.

    Not collective. Each :class:`chainer.links.BatchNormalization` of the model becomes
    a :class:`MultiNodeBatchNormalization` with all that it held: options, parameters
    (also such that have no shape yet), running statistics, device, name, hooks, and
    whether it is frozen. Everything else is a deep copy. The paths of parameters stay
    as they are, links that appear in several places stay shared, and one that is a
    :class:`MultiNodeBatchNormalization` already keeps its communicator.

    A class derived from ``BatchNormalization`` is converted if it only has other
    settings. One with a forward pass of its own, such as
    :class:`chainer.links.BatchRenormalization`, is left as it is, with a warning.

    Args:
        link: the model, or a batch normalization itself; not changed.
        comm: communicator made by :func:`chainermn_ng.create_communicator`.
        communication_backend: see :class:`MultiNodeBatchNormalization`.

    Returns:
        chainer.Link: of the class of ``link``, unless that is converted itself.

    Raises:
        TypeError: ``link`` is no link, or ``comm`` no such communicator.
        ValueError: ``communication_backend`` is unknown, or ``comm`` does not have it.
    """
    if not isinstance(link, chainer.Link):
        raise TypeError(
            f"create_mnbn_model: expected a chainer.Link; got {type(link).__qualname__}"
        )
    check_communication_backend(comm, communication_backend)
    # Deep copies find the new links in it, wherever the model refers to the old ones.
    memo: dict[int, Any] = {}
    # Children first: what holds them refers to the new ones then.
    for path, child in reversed(list(link.namedlinks())):
        if id(child) in memo:
            continue
        if isinstance(child, chainer.Sequential):
            # Chainer refuses to copy one that holds a lambda.
            twin = type(child).__new__(type(child))
            memo[id(child)] = twin
            vars(twin).update(copy.deepcopy(vars(child), memo))
        elif _is_to_be_converted(path, child):
            state = copy.deepcopy(vars(child), memo)
            memo[id(child)] = MultiNodeBatchNormalization.from_link(
                state, comm, communication_backend
            )
    return copy.deepcopy(link, memo)


def _is_to_be_converted(path: str, link: chainer.Link) -> bool:
    is_plain = isinstance(link, L.BatchNormalization)
    if not is_plain or isinstance(link, MultiNodeBatchNormalization):
        return False
    if _has_own_forward(type(link)):
        warnings.warn(
            f"create_mnbn_model: {path} is a {type(link).__qualname__}, which has a "
            "forward pass of its own; it is left as it is and knows only the batch of "
            "its rank",
            stacklevel=3,
        )
        return False
    return True


def _has_own_forward(cls: type[L.BatchNormalization]) -> bool:
    base = L.BatchNormalization
    return cls.forward is not base.forward or cls.__call__ is not base.__call__
