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


def orders(comm):
    # Six epochs of a synchronized iterator, and whether a resume repeats their end.

    def create(seed):
        np.random.seed(seed + comm.rank)
        actual = chainer.iterators.MultiprocessIterator(
            list(range(6)), 4, n_processes=1
        )
        return chainermn_ng.iterators.create_synchronized_iterator(actual, comm)

    saved = {}
    with create(0) as iterator:
        before = [next(iterator) for _ in range(2)]
        iterator.serialize(chainer.serializers.DictionarySerializer(saved))
        after = [next(iterator) for _ in range(7)]
    with create(5) as again:
        again.serialize(chainer.serializers.NpzDeserializer(saved))
        return [before + after, after == [next(again) for _ in range(7)]]


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
    found = [total, iterator.epoch]
    if method == "fork":
        found += orders(comm)
    ranks = comm.gather_obj(found)
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
    ranks = report_of(result)
    # 20 batches are two epochs of 0 to 39.
    assert [rank[:2] for rank in ranks] == [[2 * 780.0, 2]] * 2, result.output
    if method == "fork":
        assert ranks[0][2:] == ranks[1][2:], result.output
        numbers = [i for batch in ranks[0][2] for i in batch]
        epochs = [numbers[at : at + 6] for at in range(0, 36, 6)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 6
        assert len(set(map(tuple, epochs))) > 3
        assert ranks[0][3] is True, "another order after the resume"
    # Once: on rank 0 only, and not when the pool starts again.
    n_warnings = result.stderr.count(WARNING)
    assert n_warnings == (method == "fork"), result.output
