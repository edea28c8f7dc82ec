"""What the links of a model hold beside parameters."""

from __future__ import annotations

import copy

import chainer


def meets_other_ranks(model: chainer.Link) -> bool:
    """Tell whether the forward pass of some link is collective.

    Such links have an attribute ``meets_other_ranks`` that is true.
    """
    return any(getattr(link, "meets_other_ranks", False) for link in model.links())


class LinkAttributes:
    """What a model's links hold beside parameters, kept to be put back.

    A forward pass may change it: running statistics, states of recurrent links.
    Persistent values are copied; of other attributes the reference is kept.
    """

    def __init__(self, model: chainer.Link) -> None:
        self._saved = []
        for link in model.links():
            attributes = dict(link.__dict__)
            for name in link._persistent:
                attributes[name] = copy.deepcopy(attributes[name])
            self._saved.append((link, attributes))

    def restore(self) -> None:
        """Put the attributes back; links and parameters stay as they are."""
        for link, attributes in self._saved:
            for name, value in attributes.items():
                if not isinstance(value, chainer.Link | chainer.Parameter):
                    link.__dict__[name] = value
