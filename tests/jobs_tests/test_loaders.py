"""Worker processes that load data beside MPI, by each way to start them."""

import pytest
from helpers.jobs import run_job
from helpers.reports import report_of

LOAD = """
import json
import multiprocessing
import sys

import numpy as np

import chainermn_ng
import chainer


class Pictures(chainer.dataset.DatasetMixin):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def get_example(self, i):
        return np.full((3, 4), self.numbers[i], "f")


def main():
    method = sys.argv[1]
    if method != "default":
        multiprocessing.set_start_method(method)
    comm = chainermn_ng.create_communicator("flat", timeout_s=40)
    shard = chainermn_ng.scatter_dataset(list(range(40)), comm, shuffle=True, seed=0)
    data = Pictures([shard[i] for i in range(len(shard))])
    total = 0.0
    with chainer.iterators.MultiprocessIterator(data, 2, n_processes=2) as iterator:
        for _ in range(20):
            batch = np.stack(next(iterator))
            total += float(comm.allreduce(batch.sum())) / 12
    ranks = comm.gather_obj([total, iterator.epoch])
    if comm.rank == 0:
        print("REPORT", json.dumps(ranks))
    comm.finalize()


if __name__ == "__main__":
    main()
"""
WARNING = "set_start_method('forkserver')"


@pytest.mark.reports(
    "chainer/chainermn#204",
    "chainer/chainermn#211",
    "chainer/chainermn#246",
    "dials/dials#1998",
    "brainiak/brainiak#501",
)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_twenty_batches_with_reductions_between(method, tmp_path):
    program = tmp_path / "load.py"
    program.write_text(LOAD)
    # Python's own: on forking while threads run.
    quiet = ["-W", "ignore::DeprecationWarning"]
    result = run_job(2, [*quiet, program, method], timeout_s=100)
    # 20 batches are two epochs of 0 to 39.
    assert report_of(result) == [[2 * 780.0, 2]] * 2, result.output
    # Once: on rank 0 only, and not when the pool starts again.
    n_warnings = result.stderr.count(WARNING)
    assert n_warnings == (method == "fork"), result.output
