"""Every iterator in a trainer that is saved to a file and resumed, rank by rank."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import datasets
from chainer.iterators import SerialIterator, ShuffleOrderSampler
from helpers.chainer_models import batches, same_on_all_ranks, weights
from helpers.ranks import assert_all_ranks

from chainermn_ng.datasets import scatter_dataset
from chainermn_ng.extensions import MultiNodeEarlyStoppingTrigger
from chainermn_ng.iterators import (
    ShardIterator,
    create_multi_node_iterator,
    create_synchronized_iterator,
)
from chainermn_ng.optimizers import create_multi_node_optimizer


def trainer_of(comm, kind, seed):
    data = datasets.TupleDataset(*batches(1, 11)[0])
    count_samples = None
    if kind == "shards":
        shard = scatter_dataset(data, comm, force_equal_length=False)
        it = ShardIterator(shard, 2, comm, seed=seed)
        count_samples = it.count_samples
    else:
        sampler = ShuffleOrderSampler(np.random.RandomState(seed))
        create = create_multi_node_iterator
        if kind == "synchronized":
            create = create_synchronized_iterator
        it = create(SerialIterator(data, 4, order_sampler=sampler), comm)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, count_samples=count_samples
    ).setup(L.Classifier(L.Linear(5, 3)))
    updater = chainer.training.StandardUpdater(it, optimizer)
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, patience=20, max_trigger=(6, "epoch"), check_trigger=(2, "iteration")
    )
    return chainer.training.Trainer(updater, trigger, out="unused")


@pytest.mark.reports("chainer/chainer#3754")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", ["shards", "multi-node", "synchronized"])
def test_a_resumed_run_gives_the_bits_of_the_unbroken_one(comm, tmp_path, kind):
    path = tmp_path / f"{comm.rank}.npz"
    unbroken = trainer_of(comm, kind, 1)

    @unbroken.extend
    def save(trainer):
        if trainer.updater.iteration == 7:
            chainer.serializers.save_npz(path, trainer)

    unbroken.run()
    resumed = trainer_of(comm, kind, 2)
    chainer.serializers.load_npz(path, resumed)
    assert resumed.updater.iteration == 7
    resumed.run()
    models = [t.updater.get_optimizer("main").target for t in (unbroken, resumed)]
    one, other = map(weights, models)
    ok = all((one[name] == other[name]).all() for name in one)
    ok &= unbroken.updater.iteration == resumed.updater.iteration > 10
    assert_all_ranks(comm, bool(ok), f"{resumed.updater.iteration}")
    assert_all_ranks(comm, same_on_all_ranks(comm, models[1]))
