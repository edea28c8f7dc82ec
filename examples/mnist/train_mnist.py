"""Train a classifier of handwritten digits with Chainer, on several ranks.

The port of train_mnist_single.py, a plain Chainer script.

    mpiexec -n 4 python examples/mnist/train_mnist.py --communicator multi_ring
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


class MLP(chainer.Chain):
    """Three fully connected layers; the first learns its input size by itself."""

    def __init__(self, n_units, n_out):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, n_out)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


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
    parser = argparse.ArgumentParser(description="Handwritten digits with Chainer")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--double-buffering", action="store_true")
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--batchsize", type=int, default=100)
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/mnist")
    parser.add_argument("--smoke", action="store_true", help="stop after two epochs")
    parser.add_argument("--expect-accuracy", type=float, default=0.0)
    args = parser.parse_args()
    if args.smoke:
        args.epoch = 2

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    model = L.Classifier(MLP(args.unit, 10))
    model.to_device(device)
    optimizer = chainer.optimizers.Adam()
    optimizer = chainermn_ng.create_multi_node_optimizer(
        optimizer, comm, double_buffering=args.double_buffering
    )
    optimizer.setup(model)

    # One rank of each host downloads, the others wait; then each gets its shard.
    train, test = chainermn_ng.run_once_per_host(comm, load, args.dataset)
    train = chainermn_ng.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    test = chainermn_ng.scatter_dataset(test, comm)
    args.batchsize = max(args.batchsize // comm.size, 1)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    evaluator = chainermn_ng.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator)
    columns = ["epoch", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(columns))
        trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.run()
    optimizer.flush()  # with double buffering the last gradient is still on its way

    accuracy = float(evaluator()["validation/main/accuracy"])
    digests = comm.allgather_obj(digest(model))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {text}")
        print(f"validation accuracy: {accuracy:.4f}")
    if len(set(digests)) > 1:
        raise SystemExit("the ranks hold different parameters")
    if accuracy < args.expect_accuracy:
        raise SystemExit(f"expected at least {args.expect_accuracy}")


if __name__ == "__main__":
    main()
