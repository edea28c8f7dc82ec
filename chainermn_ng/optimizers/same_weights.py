"""In debug mode: do all ranks hold the same weights after a step?"""

from __future__ import annotations

from collections.abc import Sequence

import chainer

import communicators
from chainermn_ng.communicators.parameters import digest_of_array


def check_same_weights(
    engine: communicators.CommunicatorBase,
    parameters: Sequence[tuple[str, chainer.Parameter]],
    label: str,
) -> None:
    """Compare the parameters of all ranks, bit by bit. Collective.

    One message of a few words, as long as they are the same; every parameter is read
    once, through host memory.

    Args:
        engine: the communicator.
        parameters: of a model, with their paths, in an order equal on all ranks.
        label: says to the ranks' agreement which weights these are.

    Raises:
        MismatchError: they differ; the text names the first of the parameters that do,
            and which ranks hold the same one. On all ranks.
    """
    found = []
    for name, parameter in parameters:
        array = parameter.raw_array
        if array is None:
            found.append((name, "not initialised"))
        else:
            found.append((name, f"values {digest_of_array(array).hex()[:12]}"))
    engine.agree(label, found)
