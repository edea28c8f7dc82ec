"""Train a classifier of handwritten digits whose layers are on different ranks.

    mpiexec -n 2 python examples/mnist/train_mnist_model_parallel.py

Rank 0 has the first layer, each other rank one in the middle, and rank 0 the last one
again: so images, labels and the loss are all on rank 0. MultiNodeChainList sends what
passes from layer to layer, forward, and the gradients back. Every rank has parameters
of its own, so each has a plain Chainer optimizer.
"""

import argparse

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.training import extensions


class Hidden(chainer.Chain):
    """A fully connected layer and its activation function."""

    def __init__(self, n_in, n_out):
        super().__init__()
        with self.init_scope():
            self.layer = L.Linear(n_in, n_out)

    def forward(self, x):
        return F.relu(self.layer(x))


class MLP(chainermn_ng.MultiNodeChainList):
    """This rank's part of a network whose layers go round the ranks, from 0 to 0."""

    def __init__(self, comm, n_pixels, n_units, n_out):
        super().__init__(comm)
        following, preceding = (comm.rank + 1) % comm.size, comm.rank - 1
        if comm.rank == 0:
            self.add_link(Hidden(n_pixels, n_units), rank_in=None, rank_out=following)
            last = comm.size - 1
            self.add_link(L.Linear(n_units, n_out), rank_in=last, rank_out=None)
        else:
            layer = Hidden(n_units, n_units)
            self.add_link(layer, rank_in=preceding, rank_out=following)


def load(name):
    """Return training and validation data: pairs of a float32 image and a label."""
    if name == "mnist":
        return chainer.datasets.get_mnist()
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    dataset = chainer.datasets.TupleDataset(images, labels)
    return chainer.datasets.split_dataset_random(dataset, len(images) * 4 // 5, seed=0)


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits, model parallel")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--batchsize", type=int, default=100)
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/mnist_model_parallel")
    parser.add_argument("--smoke", action="store_true", help="stop after three epochs")
    args = parser.parse_args()
    if args.smoke:
        args.epoch = 3

    comm = chainermn_ng.create_communicator(args.communicator)
    if comm.size < 2:
        raise SystemExit("the layers need two ranks: start it by mpiexec -n 2")
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)

    train, test = chainermn_ng.run_once_per_host(comm, load, args.dataset)
    model = MLP(comm, len(train[0][0]), args.unit, 10)
    if comm.rank == 0:
        model = L.Classifier(model)
    else:
        # As many samples, with nothing in them: these ranks get what passes by.
        train = chainermn_ng.datasets.create_empty_dataset(train)
        test = chainermn_ng.datasets.create_empty_dataset(test)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)

    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    # All ranks evaluate, since the model needs them all; rank 0 alone reports.
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    columns = ["epoch", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()


if __name__ == "__main__":
    main()
