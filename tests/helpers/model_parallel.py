"""Models cut over ranks, and the same models in one process."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn_ng

N_IN, N_HIDDEN, N_CLASSES = 9, 12, 5


class Part(chainer.Chain):
    """One linear layer with tanh; takes the sum of its inputs."""

    def __init__(self, seed: int, n_in: int, n_out: int, dtype: Any = "f") -> None:
        super().__init__()
        random = np.random.RandomState(seed)
        weight = random.normal(scale=0.4, size=(n_out, n_in)).astype(dtype)
        with self.init_scope():
            self.linear = L.Linear(n_in, n_out, initialW=weight)

    def forward(self, *xs: Any) -> Any:
        return F.tanh(self.linear(sum(xs)))


def parts_of_chain(size: int) -> list[Part]:
    """Return one layer for each rank."""
    widths = [N_IN, *[N_HIDDEN] * (size - 1), N_CLASSES]
    return [Part(i, widths[i], widths[i + 1]) for i in range(size)]


def parts_of_branches(size: int) -> list[Part]:
    """Return a stem, a layer for each other rank, and a head that adds them."""
    branches = [Part(1 + i, N_HIDDEN, N_HIDDEN) for i in range(1, size)]
    return [Part(0, N_IN, N_HIDDEN), *branches, Part(9, N_HIDDEN, N_CLASSES)]


class ChainModel(chainermn_ng.MultiNodeChainList):
    """Rank r computes layer r; the last rank has the loss."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        rank, last = comm.rank, comm.size - 1
        self.add_link(
            parts_of_chain(comm.size)[rank],
            rank_in=None if rank == 0 else rank - 1,
            rank_out=None if rank == last else rank + 1,
        )


class BranchModel(chainermn_ng.MultiNodeChainList):
    """Rank 0 computes stem and head and has the loss; the others a branch each."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        parts = parts_of_branches(comm.size)
        others = list(range(1, comm.size))
        if comm.rank == 0:
            self.add_link(parts[0], rank_in=None, rank_out=[0, *others])
            # Its own output goes around the branches too.
            self.add_link(parts[-1], rank_in=[*others, 0], rank_out=None)
        else:
            self.add_link(parts[comm.rank], rank_in=0, rank_out=0)


class JoinedModel(chainer.ChainList):
    """The parts of all ranks, in one process."""

    def __init__(self, parts: list[Part], has_branches: bool) -> None:
        super().__init__(*parts)
        self.has_branches = has_branches

    def forward(self, x: Any) -> Any:
        stem, *middle, head = self
        h = stem(x)
        if self.has_branches:
            return head(*(part(h) for part in middle), h)
        for part in middle:
            h = part(h)
        return head(h)


def digits(n_samples: int, seed: int = 0) -> Any:
    """Return images as vectors, shape (n_samples, N_IN), and their classes."""
    random = np.random.RandomState(seed)
    t = random.randint(0, N_CLASSES, n_samples).astype("i")
    centres = np.random.RandomState(99).normal(size=(N_CLASSES, N_IN))
    x = centres[t] + 0.3 * random.normal(size=(n_samples, N_IN))
    return x.astype("f"), t


def loss_function(model: Any, has_loss: bool) -> Any:
    """Return the loss function of one rank: of the data, or the delegate alone."""

    def loss(x: Any, t: Any) -> Any:
        y = model(x)
        return F.softmax_cross_entropy(y, t) if has_loss else y

    return loss
