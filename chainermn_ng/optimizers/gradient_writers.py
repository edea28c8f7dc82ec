"""Does an optimizer leave the gradients that it is given as they are?"""

from __future__ import annotations

from collections.abc import Sized

import chainer


def gradient_writers(optimizer: chainer.Optimizer) -> tuple[Sized, ...]:
    """Return tables of what may write to gradients; it may as long as one is not empty.

    Hooks and rules of the user's may write to a gradient, and change another one with
    it where Chainer's backward pass has made one array of two. The tables are those
    that hooks are added to and removed from later, so that looking again costs little.
    There is also something in them for an optimizer that is not known to replace
    absent gradients by zeros itself.

    Args:
        optimizer: set up on a model.
    """
    rules = [rule for p in optimizer.target.params() if (rule := p.update_rule)]
    kind = type(optimizer)
    others = [type(rule) for rule in rules if not _is_chainers(type(rule))]
    if (
        getattr(kind, "update", None) is not _CHAINERS_UPDATE
        or getattr(kind, "reallocate_cleared_grads", None) is not _CHAINERS_REALLOCATE
    ):
        others.append(kind)
    tables: list[Sized] = [others]
    for owner in (optimizer, *rules):
        hookable = owner._hookable
        tables += [hookable._pre_update_hooks, hookable._post_update_hooks]
    return tuple(tables)


_CHAINERS_UPDATE = chainer.GradientMethod.update
_CHAINERS_REALLOCATE = chainer.GradientMethod.reallocate_cleared_grads


def _is_chainers(kind: type) -> bool:
    return kind.__module__.startswith("chainer.")
