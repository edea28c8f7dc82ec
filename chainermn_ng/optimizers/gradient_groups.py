"""Which gradients travel together while the backward pass goes on, and whose they are.

The numbers: a group cannot start before its last gradient is final. If the link needs
as long for all gradients as the backward pass for computing them, it stands idle, all
in all, for as long as it takes to compute the largest group: with 24 groups about 4 %
of the pass. And when the pass ends, the step waits for the last group at least: it has
a quarter of the full size, and so has the first one, with which the link begins; the
size doubles from both ends. What a group costs beside its bytes (a meeting of the
ranks, the hand-over to a thread) are some tenths of a millisecond. 1 MiB takes 8 ms on
1 Gbit/s, so smaller groups would not be worth it; 16 MiB fill the four buckets that a
communicator has in flight, and larger ones gain nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn_ng.communicators.parameters import gradient_of, set_gradient

#: Bounds of the largest group, in bytes of gradients.
SMALLEST_LIMIT, LARGEST_LIMIT = 1 << 20, 1 << 24
#: Part of all gradients that the largest group has within these bounds.
PART_OF_ALL = 24
#: Part of the largest group that the first and the last one have.
PART_AT_ENDS = 4
#: By this part of its limit a group may be larger, where a small array would else be
#: alone: a bias, say, before or behind large weights.
PART_OF_GROUP = 32


def default_overlap_bytes(total: int) -> int:
    """Return the limit of a group for so many bytes of gradients."""
    return min(max(total // PART_OF_ALL, SMALLEST_LIMIT), LARGEST_LIMIT)


def cut_into_groups(nbytes: Sequence[int], overlap_bytes: int) -> list[list[int]]:
    """Cut arrays, in the order in which they become final, into groups.

    Pure: the same input gives the same groups on all ranks.

    Args:
        nbytes: of each array.
        overlap_bytes: no group is larger, but for a single array, and for small ones
            beside it of at most a part of 32 in all; the first and the last one have at
            most a quarter of it, their neighbours a half.

    Returns:
        list[list[int]]: indices, ascending throughout; no group is empty.
    """
    total, before, middle = sum(nbytes), 0, 0
    while middle < len(nbytes) and 2 * (before + nbytes[middle]) <= total:
        before += nbytes[middle]
        middle += 1
    first_half = _growing_groups(range(middle), nbytes, overlap_bytes)
    second_half = _growing_groups(
        range(len(nbytes) - 1, middle - 1, -1), nbytes, overlap_bytes
    )
    return first_half + [group[::-1] for group in reversed(second_half)]


def _growing_groups(
    indices: Sequence[int], nbytes: Sequence[int], overlap_bytes: int
) -> list[list[int]]:
    """Cut some of the arrays into groups of which each may have twice as much."""
    groups: list[list[int]] = []
    limit, total, beyond = overlap_bytes / PART_AT_ENDS, 0, 0
    for index in indices:
        n = nbytes[index]
        # What is small beside the other: the array, or all that is in the group.
        more = 0 if total + n <= limit else min(total, n)
        if groups and beyond + more <= limit / PART_OF_GROUP:
            groups[-1].append(index)
            total, beyond = total + n, beyond + more
            continue
        if groups:
            limit = min(2 * limit, overlap_bytes)
        groups.append([index])
        total, beyond = n, 0
    return groups


def own_gradient(parameter: chainer.Parameter) -> Any:
    """Return the gradient of a parameter in memory that nothing else refers to.

    For the middle of a backward pass: functions hand their outputs' gradients on to
    their inputs as they are, so that the gradient of a parameter may be what another
    function is about to read. Then it is replaced by a copy. Whether somebody else
    holds it is told by the number of references.
    """
    grad = gradient_of(parameter)
    if grad is None:
        return None
    is_plain = getattr(grad.flags, "writeable", True) and 0 not in grad.strides
    del grad
    if not is_plain or not _is_the_only_holder(parameter):
        set_gradient(parameter, gradient_of(parameter).copy())
    return gradient_of(parameter)


def _is_the_only_holder(parameter: chainer.Parameter) -> bool:
    references = _references(parameter)
    expected = _expected[len(references)]
    return all(n <= most for n, most in zip(references, expected, strict=True))


def _references(parameter: chainer.Parameter) -> list[int]:
    """Count what refers to a gradient: the variable, its array, and the array's base.

    As many are listed as there are.
    """
    held = parameter.grad_var
    counts = [sys.getrefcount(held)]
    array = held.raw_array
    counts.append(sys.getrefcount(array))
    base = array.base
    if base is not None:
        counts.append(sys.getrefcount(base))
    return counts


def _expected_references() -> dict[int, list[int]]:
    """Count them where a gradient is known to have no other holder."""
    counts = {}
    for is_view in (False, True):
        parameter = chainer.Parameter(np.zeros((2, 3)))
        parameter.grad_var = chainer.Variable(
            np.zeros(6).reshape(2, 3) if is_view else np.zeros((2, 3))
        )
        found = _references(parameter)
        counts[len(found)] = found
    return counts


_expected = _expected_references()
