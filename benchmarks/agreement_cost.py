"""What the ranks' agreement adds to a step of the digits example, as a ratio.

Steps with the agreement and steps without it take turns in one job, so that whatever
else the machine does falls on both. Each step counts as long as it took on its slowest
rank; printed is the median of the differences within pairs of neighbours.

    mpiexec -n 2 python benchmarks/agreement_cost.py
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
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
    parser.add_argument("--steps", type=int, default=1500, help="of each kind")
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

    def step(agreed: bool) -> float:
        with contextlib.nullcontext() if agreed else no_agreement():
            start = time.perf_counter()
            optimizer.update(model, *batch)
            return time.perf_counter() - start

    for _ in range(50):
        step(agreed=True)
    # Which of a pair comes first changes from pair to pair.
    times = np.array(
        [
            sorted((not agreed, step(agreed)) for agreed in (i % 2 == 0, i % 2 == 1))
            for i in range(args.steps)
        ]
    )[..., 1]

    slowest = comm.allreduce(times, op="max")
    if comm.rank == 0:
        agreed_s, trusting_s = np.median(slowest, axis=0)
        added_s = np.median(slowest[:, 0] - slowest[:, 1])
        print(f"{comm.size} ranks, {comm.name}, {args.steps} steps of each kind")
        print(f"step with the agreement:    {agreed_s * 1e6:6.0f} us (median)")
        print(f"step without the agreement: {trusting_s * 1e6:6.0f} us (median)")
        print(
            f"the agreement adds:         {added_s * 1e6:6.0f} us, "
            f"{added_s / trusting_s * 100:.1f} % of a step without it"
        )


if __name__ == "__main__":
    main()
