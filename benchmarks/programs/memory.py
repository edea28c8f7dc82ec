"""Memory that a contender takes beyond the arrays which it reduces.

Reported: bytes of this rank at the worst moment, and what stays. A page of shared
memory counts once over the processes that share it, as each has its part of it (Linux
calls that the proportional set size).
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gradient_shapes import shapes_of
from benchmarks.programs.contenders import WORLD, make_contender, report


@dataclass(frozen=True)
class Memory:
    """Bytes of this process.

    Attributes:
        resident: in memory now, shared pages counted as if they were its own.
        peak: the most that ``resident`` has been since the last ``forget_peak``.
        others: what of shared memory is in ``resident`` and another process's part.
    """

    resident: int
    peak: int
    others: int


def forget_peak() -> None:
    """Let the peak start again from what is resident now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def memory_now() -> Memory:
    """Read the kernel's accounts of this process."""
    status = _bytes_in("/proc/self/status")
    shares = _bytes_in("/proc/self/smaps_rollup")
    others = status["RssShmem"] - shares["Pss_Shmem"]
    return Memory(status["VmRSS"], status["VmHWM"], others)


def _bytes_in(path: str) -> dict[str, int]:
    """Return the sizes that a file of the kernel gives, by name."""
    fields = {}
    for line in pathlib.Path(path).read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            fields[words[0].removesuffix(":")] = int(words[1]) * 1024
    return fields


def main(args: Sequence[str] | None = None) -> None:
    """Reduce a few times and report what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contender", metavar="KIND:NAME")
    parser.add_argument("--gradients", default="resnet50")
    parser.add_argument("--calls", type=int, default=3)
    options = parser.parse_args(args)
    shapes = shapes_of(options.gradients)

    # What MPI and the packages take at their first use is not the contender's.
    warm = make_contender(options.contender, [(1000,)])
    warm.fill()
    warm.reduce()
    token = np.zeros(1 << 20, np.uint8)
    WORLD.Allreduce(token.copy(), token)

    contender = make_contender(options.contender, shapes)
    contender.fill()
    # All must be there while any one looks: parts depend on who has touched a page.
    WORLD.Barrier()
    before = memory_now()
    forget_peak()
    WORLD.Barrier()
    for _ in range(options.calls):
        contender.reduce()
    WORLD.Barrier()
    after = memory_now()
    WORLD.Barrier()
    counted_twice = after.others - before.others
    report(
        {
            "peak": after.peak - before.resident - counted_twice,
            "stays": after.resident - before.resident - counted_twice,
        }
    )


if __name__ == "__main__":
    main()
