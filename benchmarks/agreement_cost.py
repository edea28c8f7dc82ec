"""What the ranks' agreement adds to a step of the digits example, as a ratio.

Blocks of steps with the agreement and blocks without it take turns in one job, so that
whatever else the machine does falls on both. The medians over all steps are compared;
steps are timed on the slowest rank.

    mpiexec -n 2 python benchmarks/agreement_cost.py
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import chainermn_ng

import chainer
import numpy as np
from chainer import links as L
from communicators import agreement

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples" / "mnist"
sys.path.insert(0, str(EXAMPLES))

from train_mnist import MLP, load  # noqa: E402


@contextlib.contextmanager
def no_agreement() -> Iterator[None]:
    """Let every rank believe that the others do the same as it does."""

    def believe(*_args: Any, presence: Any = None, **_options: Any) -> Any:
        return None if presence is None else list(presence)

    with (
        mock.patch.object(agreement.Agreement, "check", believe),
        mock.patch.object(agreement, "digest_of", return_value=b""),
    ):
        yield


def main() -> None:
    """Time the steps and print the ratio on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--batchsize", type=int, default=100, help="over all ranks")
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=30, help="of each kind")
    parser.add_argument("--steps", type=int, default=40, help="in a block")
    args = parser.parse_args()

    comm = chainermn_ng.create_communicator(args.communicator)
    model = L.Classifier(MLP(args.unit, 10))
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm
    )
    optimizer.setup(model)
    train, _ = load("digits")
    train = chainermn_ng.scatter_dataset(train, comm)
    n_samples = max(args.batchsize // comm.size, 1)
    batch = chainer.dataset.concat_examples([train[i] for i in range(n_samples)])

    def block() -> list[float]:
        seconds = []
        for _ in range(args.steps):
            start = time.perf_counter()
            optimizer.update(model, *batch)
            seconds.append(time.perf_counter() - start)
        return seconds

    block()
    with_it: list[float] = []
    without_it: list[float] = []
    for _ in range(args.blocks):
        with_it += block()
        with no_agreement():
            without_it += block()

    slowest = comm.allreduce(np.array([with_it, without_it]), op="max")
    if comm.rank == 0:
        agreed, trusting = (statistics.median(row) for row in slowest)
        print(f"{comm.size} ranks, {comm.name}, {slowest.shape[1]} steps of each kind")
        print(f"step with the agreement:    {agreed * 1e6:6.0f} us (median)")
        print(f"step without the agreement: {trusting * 1e6:6.0f} us (median)")
        print(f"the agreement adds:         {(agreed / trusting - 1) * 100:6.1f} %")


if __name__ == "__main__":
    main()
