"""Steps of the digits example with the ranks' agreement and without it take turns.

They do so in one job, so that whatever else the machine does falls on both. Reported:
seconds by kind and step.

    mpiexec -n 2 python benchmarks/programs/agreement_cost.py
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import chainermn_ng

import chainer
from communicators import agreement

from benchmarks.programs.contenders import report
from benchmarks.programs.digits import batch_of_digits, digits_model, load


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


def main(args: Sequence[str] | None = None) -> None:
    """Time the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--batchsize", type=int, default=100, help="over all ranks")
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1500, help="of each kind")
    options = parser.parse_args(args)

    comm = chainermn_ng.create_communicator(options.communicator)
    model = digits_model(options.unit)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm
    )
    optimizer.setup(model)
    train = chainermn_ng.scatter_dataset(load("digits")[0], comm)
    batch = batch_of_digits(train, max(options.batchsize // comm.size, 1))

    def step(agreed: bool) -> float:
        with contextlib.nullcontext() if agreed else no_agreement():
            start = time.perf_counter()
            optimizer.update(model, *batch)
            return time.perf_counter() - start

    seconds: dict[str, list[float]] = {"agreed": [], "trusting": []}
    for _ in range(50):
        step(agreed=True)
    for i in range(options.steps):
        # Which of a pair comes first changes from pair to pair.
        for agreed in (i % 2 == 0, i % 2 == 1):
            seconds["agreed" if agreed else "trusting"].append(step(agreed))
    report(seconds)


if __name__ == "__main__":
    main()
