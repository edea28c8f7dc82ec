"""Steps whose backward takes as long as the link needs for their gradients.

Steps without communication, with it after the backward and with it meanwhile take
turns. Reported: seconds by kind and step, and the batch size. With ``--samples`` there
are only steps without communication, for a batch of that size: what else the machine
does at the time shows in them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L

from benchmarks.links import link_seconds
from benchmarks.programs.contenders import WORLD, report

N_LAYERS = 8
N_CLASSES = 10


class DeepMLP(chainer.Chain):
    """Layers of equal width, so that gradients become final evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(
                *(L.Linear(width, width) for _ in range(N_LAYERS))
            )
            self.last = L.Linear(width, N_CLASSES)

    def forward(self, x: Any, t: Any) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.softmax_cross_entropy(self.last(x), t)


def make_batch(n_samples: int, width: int) -> tuple[Any, Any]:
    """Return images (n, width) float32 and labels (n,) int32."""
    random = np.random.default_rng(WORLD.rank)
    x = random.standard_normal((n_samples, width), dtype=np.float32)
    return x, random.integers(N_CLASSES, size=n_samples).astype(np.int32)


def backward_seconds(model: DeepMLP, batch: tuple[Any, Any]) -> float:
    """Return the median time of a backward, on the rank where that is longest."""
    took = []
    for _ in range(5):
        loss = model(*batch)
        model.cleargrads()
        # All compute at once, as they do in a step.
        WORLD.Barrier()
        start = time.perf_counter()
        loss.backward()
        took.append(time.perf_counter() - start)
    return max(WORLD.allgather(statistics.median(took)))


def batch_for(model: DeepMLP, width: int, target_s: float) -> tuple[Any, Any]:
    """Return a batch whose backward takes about ``target_s``."""
    n_samples = 64
    for _ in range(3):
        took = backward_seconds(model, make_batch(n_samples, width))
        n_samples = min(max(8, round(n_samples * target_s / took)), 1 << 14)
    return make_batch(n_samples, width)


def make_step(
    width: int, wrap: Callable[[chainer.Optimizer], Any]
) -> Callable[..., None]:
    """Return what makes one step of a model and optimizer of its own."""
    model = DeepMLP(width)
    optimizer = wrap(chainer.optimizers.SGD(1e-3))
    optimizer.setup(model)
    return lambda *batch: optimizer.update(model, *batch)


def take_turns(
    steps: Mapping[str, Callable[..., None]], batch: tuple[Any, Any], n_steps: int
) -> dict[str, list[float]]:
    """Return the seconds of each step of each kind, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(-2, n_steps):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            WORLD.Barrier()
            start = time.perf_counter()
            steps[name](*batch)
            took = time.perf_counter() - start
            if i >= 0:
                seconds[name].append(took)
    return seconds


def main(args: Sequence[str] | None = None) -> None:
    """Tune the batch to the link, then take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, help="bytes a second of the link")
    parser.add_argument("--samples", type=int, help="only steps without communication")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="of each kind")
    options = parser.parse_args(args)
    if (options.rate is None) == (options.samples is None):
        parser.error("give one of --rate and --samples")

    if options.samples is not None:
        alone = {"alone": make_step(options.width, lambda o: o)}
        batch = make_batch(options.samples, options.width)
        report({"seconds": take_turns(alone, batch, options.steps)})
        return

    create = chainermn_ng.create_multi_node_optimizer
    # One each: what works in the background must not wait behind the other.
    comm = chainermn_ng.create_communicator()
    other = chainermn_ng.create_communicator()
    kinds: dict[str, Callable[[chainer.Optimizer], Any]] = {
        "alone": lambda o: o,
        "after": lambda o: create(o, comm, overlap=False),
        "overlap": lambda o: create(o, other, overlap=True),
    }
    steps = {name: make_step(options.width, wrap) for name, wrap in kinds.items()}

    model = DeepMLP(options.width)
    nbytes = sum(parameter.raw_array.nbytes for parameter in model.params())
    link_s = link_seconds(comm.inter_size, nbytes, options.rate)
    batch = batch_for(model, options.width, link_s)
    backward_s = backward_seconds(model, batch)

    seconds = take_turns(steps, batch, options.steps)
    report(
        {
            "seconds": seconds,
            "n_samples": len(batch[0]),
            "backward_s": backward_s,
            "nbytes": nbytes,
            "link_s": link_s,
        }
    )


if __name__ == "__main__":
    main()
