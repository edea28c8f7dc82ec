"""Train a network whose convolutions are split over the ranks by channels.

    mpiexec -n 2 python examples/parallel_convolution/train_parallel_convolution.py

For layers too large for one device. Each rank has the filters of some output channels
and computes those, for the whole batch; an all-gather then gives all ranks all
channels. Everything else is the same on every rank. The training is that of one
process (mpiexec -n 1): same weights at the start, same batches, same losses.
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


class ParallelConvolution2D(chainer.Chain):
    """A convolution of which each rank computes some of the output channels.

    Args:
        comm: of the ranks that share it; their number must divide ``n_out``.
        n_in, n_out, ksize, pad: as in L.Convolution2D.

    All ranks must draw the same random numbers when they make one.
    """

    def __init__(self, comm, n_in, n_out, ksize, pad=0):
        super().__init__()
        if n_out % comm.size:
            raise ValueError(f"{comm.size} ranks cannot share {n_out} channels evenly")
        self.comm = comm
        n_own = n_out // comm.size
        whole = L.Convolution2D(n_in, n_out, ksize, pad=pad)
        own = whole.W.array[n_own * comm.rank : n_own * (comm.rank + 1)]
        with self.init_scope():
            self.conv = L.Convolution2D(n_in, n_own, ksize, pad=pad, initialW=own)

    def forward(self, x):
        channels = chainermn_ng.functions.allgather(self.comm, self.conv(x))
        return F.concat(channels, axis=1)

    def scale_gradients(self):
        """Divide the gradients by the number of ranks, after each backward pass.

        What comes back through the all-gather is the sum over the losses of all
        ranks, which are the same loss here. Call it once the optimizer is set up.
        """

        def divide(rule, param):
            if param.grad is not None:
                param.grad /= self.comm.size

        for param in self.params():
            param.update_rule.add_hook(divide, "divide_by_ranks")


class CNN(chainer.Chain):
    """Two split convolutions, and a fully connected layer that every rank has."""

    def __init__(self, comm, n_channels, n_out):
        super().__init__()
        with self.init_scope():
            self.conv1 = ParallelConvolution2D(comm, 1, n_channels, 3, pad=1)
            self.conv2 = ParallelConvolution2D(comm, n_channels, n_channels, 3, pad=1)
            self.fc = L.Linear(n_channels * 4 * 4, n_out)

    def forward(self, x):
        h = F.max_pooling_2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc(h)


def load():
    """Return training and validation data: float32 images (1, 8, 8) and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    dataset = chainer.datasets.TupleDataset(images, labels)
    return chainer.datasets.split_dataset_random(dataset, len(images) * 4 // 5, seed=0)


def digest(link):
    """Return a digest of every bit of the parameters."""
    sha256 = hashlib.sha256()
    for path, param in sorted(link.namedparams()):
        sha256.update(path.encode() + cuda.to_cpu(param.array).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="Convolutions split over the ranks")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--batchsize", type=int, default=100)
    parser.add_argument("--channel", type=int, default=32)
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/parallel_convolution")
    parser.add_argument("--smoke", action="store_true", help="stop after two epochs")
    args = parser.parse_args()
    if args.smoke:
        args.epoch, args.channel = 2, 8

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    with chainermn_ng.shared_seed(args.seed):
        network = CNN(comm, args.channel, 10)
    model = L.Classifier(network)
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(lr=0.05)
    optimizer.setup(model)
    network.conv1.scale_gradients()
    network.conv2.scale_gradients()

    # Every rank gets the batches of rank 0, and evaluates all samples for itself.
    train, test = chainermn_ng.run_once_per_host(comm, load)
    train_iter = chainermn_ng.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(train, args.batchsize), comm
    )
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    columns = ["epoch", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    digests = comm.allgather_obj(digest(network.fc))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters of the last layer (SHA-256) of rank {rank}: {text}")


if __name__ == "__main__":
    main()
