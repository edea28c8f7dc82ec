"""Save to a disk that becomes full, then read-only; rank 0 prints what happened."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

import chainermn_ng


class Numbers:
    def __init__(self, rank, iteration=0, n_elems=1000):
        self.value = np.full(n_elems, 1000.0 * rank + iteration)

    def serialize(self, serializer):
        serializer("value", self.value)


def attempt(function):
    """Return the type and text of the error that a call raises."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def main():
    folder = pathlib.Path(sys.argv[1])
    with chainermn_ng.create_communicator("naive", timeout_s=30) as comm:
        checkpointer = chainermn_ng.create_multi_node_checkpointer(
            "run", comm, path=str(folder)
        )

        def look():
            numbers = Numbers(-1)
            iteration = checkpointer.maybe_load(numbers)
            names = sorted(os.listdir(folder))
            comm.barrier()
            return [iteration, numbers.value[0] - 1000 * comm.rank, names]

        checkpointer.save(Numbers(comm.rank, 2), 2)
        big = Numbers(comm.rank, 4, 1000 if comm.rank == 0 else 500_000)
        report = {"full": attempt(lambda: checkpointer.save(big, 4)), "after": look()}
        checkpointer.save(Numbers(comm.rank, 6), 6)
        comm.barrier()
        if comm.rank == 0:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        comm.barrier()
        report["read-only"] = attempt(lambda: checkpointer.save(Numbers(0, 8), 8))
        report["at last"] = look()
        reports = comm.gather_obj(report)
        if comm.rank == 0:
            print("REPORT " + json.dumps(reports), flush=True)


if __name__ == "__main__":
    main()
