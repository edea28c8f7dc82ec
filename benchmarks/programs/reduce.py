"""Contenders reduce the same set of arrays in turns; reported: seconds a call.

mpiexec -n 2 python benchmarks/programs/reduce.py ours:flat mpi4py:flat
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benchmarks.gradient_shapes import SETS, shapes_of
from benchmarks.programs.contenders import WORLD, Contender, make_contender, report


def turn(contender: Contender, calls: int) -> float:
    """Return the seconds a call on this rank; ranks begin together."""
    contender.fill()
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        contender.reduce()
    seconds = (time.perf_counter() - start) / calls
    contender.check(calls)
    return seconds


def main(args: Sequence[str] | None = None) -> None:
    """Warm up, then take turns; who begins changes from round to round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contenders", nargs="+", metavar="KIND:NAME")
    parser.add_argument("--gradients", choices=sorted(SETS), default="resnet50")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that don't count")
    parser.add_argument("--calls", type=int, default=1, help="of a turn")
    options = parser.parse_args(args)

    shapes = shapes_of(options.gradients)
    contenders = {name: make_contender(name, shapes) for name in options.contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(-options.warmup, options.rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            took = turn(contenders[name], options.calls)
            if i >= 0:
                seconds[name].append(took)
    report(seconds)


if __name__ == "__main__":
    main()
