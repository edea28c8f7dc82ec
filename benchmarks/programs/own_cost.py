"""What a reduction costs in our own code: many small arrays, and nothing is sent.

Reported: seconds to make the communicator, of the first call, and of each later one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
from communicators import create_communicator

from benchmarks.programs.contenders import WORLD, report


def main(args: Sequence[str] | None = None) -> None:
    """Time the calls."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arrays", type=int, default=161)
    parser.add_argument("--elements", type=int, default=161 * 64, help="of all arrays")
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args(args)

    n_elems = max(1, options.elements // options.arrays)
    arrays = [np.ones(n_elems, np.float32) for _ in range(options.arrays)]
    WORLD.Barrier()
    times = [time.perf_counter()]
    # It agrees, packs, scales and unpacks as the others do, and sends no gradients.
    comm = create_communicator("dummy")
    times.append(time.perf_counter())
    for _ in range(options.calls + 1):
        comm.allreduce_arrays(arrays)
        times.append(time.perf_counter())
    create_s, first_s, *calls = np.diff(times).tolist()
    report({"create": create_s, "first": first_s, "calls": calls})


if __name__ == "__main__":
    main()
