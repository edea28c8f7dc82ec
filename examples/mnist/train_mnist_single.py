"""Train a classifier of handwritten digits with Chainer, in one process.

A plain Chainer script; train_mnist.py is its port to several ranks. On today's NumPy,
Chainer starts by way of the launcher:

    python -m chainermn_ng examples/mnist/train_mnist_single.py
"""

import argparse
import hashlib

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
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--batchsize", type=int, default=100)
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/mnist_single")
    parser.add_argument("--smoke", action="store_true", help="stop after two epochs")
    parser.add_argument("--expect-accuracy", type=float, default=0.0)
    args = parser.parse_args()
    if args.smoke:
        args.epoch = 2
    np.random.seed(args.seed)

    device = chainer.get_device("@cupy:0" if args.gpu else "@numpy")
    device.use()
    model = L.Classifier(MLP(args.unit, 10))
    model.to_device(device)
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)

    train, test = load(args.dataset)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(evaluator)
    columns = ["epoch", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(columns))
    trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.run()

    accuracy = float(evaluator()["validation/main/accuracy"])
    print(f"parameters (SHA-256): {digest(model)}")
    print(f"validation accuracy: {accuracy:.4f}")
    if accuracy < args.expect_accuracy:
        raise SystemExit(f"expected at least {args.expect_accuracy}")


if __name__ == "__main__":
    main()
