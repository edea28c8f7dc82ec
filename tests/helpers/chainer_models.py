"""Small Chainer models, and the data and steps to compare them by."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class MLP(chainer.Chain):
    """Two layers; ``seed`` decides on the initial weights."""

    def __init__(self, seed: int = 0, n_in: int | None = 5, dtype: Any = "f") -> None:
        super().__init__()
        random = np.random.RandomState(seed)
        self.loss: Any = None
        with self.init_scope():
            self.l1 = L.Linear(n_in, 7, initialW=_normal(random, (7, 5), dtype))
            self.l2 = L.Linear(7, 3, initialW=_normal(random, (3, 7), dtype))

    def forward(self, x: Any, t: Any) -> Any:
        self.loss = F.softmax_cross_entropy(self.l2(F.tanh(self.l1(x))), t)
        return self.loss


def _normal(random: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return random.normal(size=shape).astype(dtype)


def batches(n_steps: int, n_samples: int, seed: int = 1) -> list[Any]:
    """Return ``(x, t)`` for each step: shapes (n_samples, 5) and (n_samples,)."""
    random = np.random.RandomState(seed)
    return [
        (
            random.normal(size=(n_samples, 5)).astype("f"),
            random.randint(0, 3, n_samples).astype("i"),
        )
        for _ in range(n_steps)
    ]


def part(comm: Any, batch: Any) -> Any:
    """Return this rank's equal part of a batch."""
    n = len(batch[0]) // comm.size
    return tuple(array[comm.rank * n : (comm.rank + 1) * n] for array in batch)


def weights(model: chainer.Link) -> dict[str, Any]:
    """Return copies of the initialised parameters' arrays by path."""
    return {
        name: p.array.copy()
        for name, p in sorted(model.namedparams())
        if p.array is not None
    }


def are_close(a: dict[str, Any], b: dict[str, Any], atol: float = 1e-5) -> bool:
    """Tell whether two models' weights agree within float tolerance."""
    return list(a) == list(b) and all(
        np.allclose(a[k], b[k], atol=atol, rtol=1e-4) for k in a
    )


def same_on_all_ranks(comm: Any, model: chainer.Link) -> bool:
    """Tell whether all ranks hold bit-identical weights."""
    mine = {k: v.tobytes() for k, v in weights(model).items()}
    everyone = comm.mpi_comm.allgather(mine)
    return all(other == mine for other in everyone)
