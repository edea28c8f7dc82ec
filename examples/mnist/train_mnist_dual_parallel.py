"""Train a classifier of handwritten digits, split by layers and by samples.

    mpiexec -n 4 python examples/mnist/train_mnist_dual_parallel.py

Two ranks together hold one copy of the network, as in train_mnist_model_parallel.py:
that is the model group. The ranks that hold the same layers are a data group: each has
its part of the samples, and the optimizer averages their gradients. On 4 ranks:

                   rank 0 and 2: first and last layer     rank 1 and 3: in the middle
    copy A         0                                      1
    copy B         2                                      3
"""

import argparse
import hashlib

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions

MODEL_RANKS = 2  # that hold one copy of the network


class Hidden(chainer.Chain):
    """A fully connected layer and its activation function."""

    def __init__(self, n_in, n_out):
        super().__init__()
        with self.init_scope():
            self.layer = L.Linear(n_in, n_out)

    def forward(self, x):
        return F.relu(self.layer(x))


class MLP(chainermn_ng.MultiNodeChainList):
    """This rank's part of a network whose two ranks pass on to each other."""

    def __init__(self, model_comm, n_pixels, n_units, n_out):
        super().__init__(model_comm)
        if model_comm.rank == 0:
            self.add_link(Hidden(n_pixels, n_units), rank_in=None, rank_out=1)
            self.add_link(L.Linear(n_units, n_out), rank_in=1, rank_out=None)
        else:
            self.add_link(Hidden(n_units, n_units), rank_in=0, rank_out=0)


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


def digest(model):
    """Return a digest of every bit of the parameters."""
    sha256 = hashlib.sha256()
    for path, param in sorted(model.namedparams()):
        sha256.update(path.encode() + cuda.to_cpu(param.array).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits, dual parallel")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--batchsize", type=int, default=100, help="of all copies")
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/mnist_dual_parallel")
    parser.add_argument("--smoke", action="store_true", help="stop after three epochs")
    args = parser.parse_args()
    if args.smoke:
        args.epoch = 3

    comm = chainermn_ng.create_communicator(args.communicator)
    if comm.size % MODEL_RANKS:
        raise SystemExit(f"{comm.size} ranks do not make pairs: start 2, 4, 6, ...")
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    # Neighbours hold one copy: they talk most, and are on one host most often.
    copy, part = divmod(comm.rank, MODEL_RANKS)
    model_comm = comm.split(copy, comm.rank)
    data_comm = comm.split(part, comm.rank)

    train, test = chainermn_ng.run_once_per_host(comm, load, args.dataset)
    model = MLP(model_comm, len(train[0][0]), args.unit, 10)
    if part == 0:
        model = L.Classifier(model)
    model.to_device(device)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.Adam(), data_comm
    )
    optimizer.setup(model)

    # Each data group shares out the same samples, so both ranks of a copy have equally
    # many; those that get what passes by need no more than that. In the evaluation the
    # copies may differ by a sample: none is repeated, which would have to be left out.
    train = chainermn_ng.scatter_dataset(train, data_comm, shuffle=True, seed=args.seed)
    test = chainermn_ng.scatter_dataset(test, data_comm, force_equal_length=False)
    if part > 0:
        train = chainermn_ng.datasets.create_empty_dataset(train)
        test = chainermn_ng.datasets.create_empty_dataset(test)
    batchsize = max(args.batchsize // data_comm.size, 1)
    train_iter = chainer.iterators.SerialIterator(train, batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, batchsize, repeat=False, shuffle=False
    )

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    columns = ["epoch", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    digests = comm.allgather_obj(digest(model))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {text}")


if __name__ == "__main__":
    main()
