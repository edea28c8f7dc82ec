"""Train in a loop of one's own, without Chainer's Trainer, on several ranks.

    mpiexec -n 2 python examples/custom_loop/train_custom_loop.py --accumulate 2

What the Trainer's extensions do elsewhere is done by hand here: the weights are made
alike before the first backward pass, gradients are accumulated over several batches
and averaged over the ranks once a step, and losses and hits are summed over the ranks
before rank 0 prints them.
"""

import argparse
import hashlib
import pathlib

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer.backends import cuda


class MLP(chainer.Chain):
    """Three fully connected layers for images of 64 pixels."""

    def __init__(self, n_units, n_out):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(64, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, n_out)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def load():
    """Return training and validation data: pairs of a float32 image and a label."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    dataset = chainer.datasets.TupleDataset(images, labels)
    return chainer.datasets.split_dataset_random(dataset, len(images) * 4 // 5, seed=0)


def loss_and_sums(model, batch, device):
    """Return a batch's mean loss, and: sum of losses, right answers, samples."""
    x, t = chainer.dataset.concat_examples(batch, device)
    y = model(x)
    loss = F.softmax_cross_entropy(y, t)
    n_right = (y.array.argmax(axis=1) == t).sum()
    return loss, np.array([float(loss.array) * len(t), float(n_right), len(t)])


def train_epoch(model, optimizer, iterator, device, n_batches):
    """Train until the iterator's epoch ends; return the sums of this rank's samples.

    The shards and batches of all ranks are equally many, and so are their steps.
    """
    sums, epoch = np.zeros(3), iterator.epoch
    while iterator.epoch == epoch:
        model.cleargrads()
        for _ in range(n_batches):
            loss, more = loss_and_sums(model, iterator.next(), device)
            (loss / n_batches).backward()  # adds to what is there
            sums += more
        optimizer.update()  # averages over the ranks, once for all these batches
    return sums


def evaluate(model, dataset, batchsize, device):
    """Return the sums of this rank's validation samples; not collective."""
    sums = np.zeros(3)
    iterator = chainer.iterators.SerialIterator(
        dataset, batchsize, repeat=False, shuffle=False
    )
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        for batch in iterator:
            sums += loss_and_sums(model, batch, device)[1]
    return sums


def means(comm, sums):
    """Return mean loss and accuracy over the samples of all ranks. Collective."""
    loss, n_right, n_samples = comm.allreduce(sums)
    return loss / n_samples, n_right / n_samples


def digest(model):
    """Return a digest of every bit of the parameters."""
    sha256 = hashlib.sha256()
    for path, param in sorted(model.namedparams()):
        sha256.update(path.encode() + cuda.to_cpu(param.array).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="A training loop of one's own")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--batchsize", type=int, default=100, help="of all ranks")
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/custom_loop")
    parser.add_argument("--smoke", action="store_true", help="stop after three epochs")
    args = parser.parse_args()
    if args.smoke:
        args.epoch, args.batchsize = 3, 48

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    model = MLP(args.unit, 10)
    model.to_device(device)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm
    )
    optimizer.setup(model)
    comm.bcast_data(model)  # the first gradients must belong to equal weights

    train, test = load() if comm.rank == 0 else (None, None)
    train = chainermn_ng.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    # Nothing is repeated to make these equally long: each sample counts once.
    test = chainermn_ng.scatter_dataset(test, comm, force_equal_length=False)
    batchsize = max(args.batchsize // comm.size, 1)
    iterator = chainer.iterators.SerialIterator(train, batchsize)

    for epoch in range(1, args.epoch + 1):
        sums = train_epoch(model, optimizer, iterator, device, args.accumulate)
        loss, accuracy = means(comm, sums)
        test_loss, test_accuracy = means(comm, evaluate(model, test, batchsize, device))
        if comm.rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}; "
                f"validation loss {test_loss:.4f}, accuracy {test_accuracy:.4f}"
            )
    if comm.rank == 0:
        folder = pathlib.Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        chainer.serializers.save_npz(folder / "model.npz", model)

    digests = comm.allgather_obj(digest(model))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {text}")


if __name__ == "__main__":
    main()
