"""Training steps of Chainer alone and with this package take turns, on one rank.

Reported: seconds by kind and step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import chainermn_ng

import chainer

from benchmarks.programs.contenders import report
from benchmarks.programs.digits import batch_of_digits, digits_model, load


def main(args: Sequence[str] | None = None) -> None:
    """Take turns; which of a pair comes first changes from pair to pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--batchsize", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000, help="of each kind")
    options = parser.parse_args(args)

    batch = batch_of_digits(load("digits")[0], options.batchsize)
    comm = chainermn_ng.create_communicator()
    optimizers: dict[str, Any] = {
        "alone": chainer.optimizers.Adam(),
        "ours": chainermn_ng.create_multi_node_optimizer(
            chainer.optimizers.Adam(), comm
        ),
    }
    models = {name: digits_model(options.unit) for name in optimizers}
    for name, optimizer in optimizers.items():
        optimizer.setup(models[name])

    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for i in range(-50, options.steps):
        for name in names if i % 2 else reversed(names):
            start = time.perf_counter()
            optimizers[name].update(models[name], *batch)
            took = time.perf_counter() - start
            if i >= 0:
                seconds[name].append(took)
    report(seconds)


if __name__ == "__main__":
    main()
