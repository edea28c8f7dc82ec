"""Train a residual network on CIFAR-10 or CIFAR-100, on several ranks.

    mpiexec -n 2 python examples/cifar/train_cifar.py --dataset cifar10

Shown here: augmentation that differs between ranks, a learning rate that follows the
batch of all ranks, and the two ways to treat batch normalization. By default each rank
normalizes by its own batch, and AllreducePersistent averages the running statistics
before each evaluation. With --mnbn the ranks normalize by the batch of all of them,
which pays when a rank's own is small.

The network is that of He et al., "Deep Residual Learning for Image Recognition",
section 4.2 (arXiv 1512.03385): 6n + 2 layers. --smoke generates its data.
"""

import argparse
import functools
import hashlib

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions


class Block(chainer.Chain):
    """Two 3x3 convolutions beside a shortcut; batch normalization after each."""

    def __init__(self, n_in, n_out, stride):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(n_in, n_out, 3, stride, 1, nobias=True)
            self.bn1 = L.BatchNormalization(n_out)
            self.conv2 = L.Convolution2D(n_out, n_out, 3, 1, 1, nobias=True)
            self.bn2 = L.BatchNormalization(n_out)
            if stride > 1 or n_in != n_out:
                self.shortcut = L.Convolution2D(n_in, n_out, 1, stride, nobias=True)

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + (self.shortcut(x) if hasattr(self, "shortcut") else x))


def resnet(n_blocks, width, n_classes):
    """Return a network of three stages, of 32, 16 and 8 pixels, for images of 32."""
    layers = [L.Convolution2D(3, width, 3, 1, 1, nobias=True)]
    layers += [L.BatchNormalization(width), F.relu]
    n_in = width
    for stage in range(3):
        n_out = width * 2**stage
        for block in range(n_blocks):
            layers.append(Block(n_in, n_out, 2 if stage > 0 and block == 0 else 1))
            n_in = n_out
    pool = functools.partial(F.mean, axis=(2, 3))
    return chainer.Sequential(*layers, pool, L.Linear(n_in, n_classes))


def augment(sample):
    """Move an image by up to four pixels and mirror every other one."""
    image, label = sample
    top, left = np.random.randint(0, 9, size=2)
    image = np.pad(image, ((0, 0), (4, 4), (4, 4)))[:, top:, left:][:, :32, :32]
    return image[:, :, :: np.random.choice((-1, 1))], label


def generate(n_samples, n_classes, seed):
    """Return noisy images, each with the colour of its class: what --smoke learns."""
    draw = np.random.RandomState(seed)
    hues = np.linspace(0, 2 * np.pi, n_classes, endpoint=False)
    colours = 0.5 + 0.4 * np.cos(hues[:, None] + np.array([0, 2, 4]))
    labels = np.arange(n_samples, dtype=np.int32) % n_classes
    noise = draw.normal(0, 0.1, (n_samples, 3, 32, 32))
    images = (colours[labels][:, :, None, None] + noise).astype(np.float32)
    return chainer.datasets.TupleDataset(images, labels)


def load(args):
    """Return training and validation data: float32 images (3, 32, 32) and labels."""
    if args.smoke:
        return generate(320, 10, seed=0), generate(100, 10, seed=1)
    if args.dataset == "cifar100":
        return chainer.datasets.get_cifar100()
    return chainer.datasets.get_cifar10()


def digest(model):
    """Return a digest of every bit of the parameters."""
    sha256 = hashlib.sha256()
    for path, param in sorted(model.namedparams()):
        sha256.update(path.encode() + cuda.to_cpu(param.array).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="CIFAR with Chainer, on several ranks")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--dataset", choices=["cifar10", "cifar100"], default="cifar10")
    parser.add_argument("--mnbn", action="store_true", help="normalize over all ranks")
    parser.add_argument("--blocks", type=int, default=3, help="n of the 6n + 2 layers")
    parser.add_argument("--width", type=int, default=16, help="channels at the start")
    parser.add_argument("--batchsize", type=int, default=128, help="of all ranks")
    parser.add_argument("--epoch", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/cifar")
    parser.add_argument("--smoke", action="store_true", help="a small network and data")
    args = parser.parse_args()
    if args.smoke:
        args.blocks, args.width, args.batchsize, args.epoch = 1, 4, 32, 3

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    n_classes = 100 if args.dataset == "cifar100" else 10
    with chainermn_ng.shared_seed(args.seed):
        network = resnet(args.blocks, args.width, n_classes)
    if args.mnbn:
        network = chainermn_ng.links.create_mnbn_model(network, comm)
    model = L.Classifier(network)
    model.to_device(device)

    # 0.1 is right for a batch of 128, however many ranks share it.
    rate = 0.1 * args.batchsize / 128
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.CorrectedMomentumSGD(lr=rate, momentum=0.9), comm
    )
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))

    train, test = chainermn_ng.run_once_per_host(comm, load, args)
    train = chainermn_ng.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    train = chainer.datasets.TransformDataset(train, augment)
    test = chainermn_ng.scatter_dataset(test, comm)
    batchsize = max(args.batchsize // comm.size, 1)
    train_iter = chainer.iterators.SerialIterator(train, batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, batchsize, repeat=False, shuffle=False
    )

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    drops = [args.epoch // 2, args.epoch * 3 // 4]
    trainer.extend(
        extensions.ExponentialShift("lr", 0.1),
        trigger=training.triggers.ManualScheduleTrigger(drops, "epoch"),
    )
    # Once an epoch, before the evaluator.
    trainer.extend(chainermn_ng.extensions.AllreducePersistent(model, comm))
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    columns = ["epoch", "lr", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    if comm.rank == 0:
        trainer.extend(extensions.observe_lr())
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    digests = comm.allgather_obj(digest(model))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {text}")


if __name__ == "__main__":
    main()
