"""Whole programs in which some rank does not come: they end, and say why."""

import pytest
from helpers.jobs import run_job

HEAD = """
import numpy as np
import chainermn_ng
import chainer
import chainer.links as L
from chainer.training import extensions
from chainermn_ng.communicators import create_communicator
from chainermn_ng.datasets import scatter_dataset
from chainermn_ng.extensions import create_multi_node_evaluator
from chainermn_ng.optimizers import create_multi_node_optimizer

comm = create_communicator("flat", timeout_s=20)
model = L.Classifier(L.Linear(2, 2))
optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
data = chainer.datasets.TupleDataset(np.ones((9, 2), "f"), np.zeros(9, "i"))
"""

EVALUATE_ON_RANK_0 = """
shard = scatter_dataset(data, comm)
iterator = chainer.iterators.SerialIterator(shard, 2, repeat=False, shuffle=False)
evaluator = create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)
if comm.rank == 0:
    evaluator()
"""

UNEVEN_SHARDS = """
shard = scatter_dataset(data, comm, force_equal_length=False)
iterator = chainer.iterators.SerialIterator(shard, 2)
updater = chainer.training.StandardUpdater(iterator, optimizer)
chainer.training.Trainer(updater, (2, "epoch"), out="unused").run()
"""

SKIP_THE_LAST_STEP = """
for step in range(3):
    if step == 2 and comm.rank == 1:
        break
    optimizer.update(model, np.ones((1, 2), "f"), np.zeros(1, "i"))
"""


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        pytest.param(
            EVALUATE_ON_RANK_0,
            ["evaluator 0 (Evaluator)", "leaving the program"],
            marks=pytest.mark.reports("horovod/horovod#600", "pytorch/pytorch#72897"),
        ),
        pytest.param(
            UNEVEN_SHARDS,
            [
                # Up front, then at the end.
                "the ranks got shards of 4 to 5 samples",
                "ShardIterator",
                "optimizer 0 (SGD), mean of the gradients",
                "leaving",
            ],
            marks=pytest.mark.reports("horovod/horovod#832", "horovod/horovod#2083"),
        ),
        (SKIP_THE_LAST_STEP, ["optimizer 0 (SGD), mean of the gradients", "leaving"]),
    ],
    ids=["evaluate on rank 0 only", "uneven shards", "skip the last step"],
)
def test_the_job_ends_with_a_message(program, texts, tmp_path):
    result = run_job(2, ["-c", HEAD + program], timeout_s=60, cwd=tmp_path)
    assert result.returncode != 0, result.output
    assert "MismatchError" in result.stderr, result.output
    for text in texts:
        assert text in result.stderr, result.output
    assert result.seconds < 30
