"""Train a generator of images against a discriminator (DCGAN), on several ranks.

    mpiexec -n 2 python examples/dcgan/train_dcgan.py

Two models and two multi-node optimizers in one updater. Their collectives pair up by
order, so all ranks must take the same steps: here the discriminator pauses while it is
winning, and the ranks decide that together, on the mean of their losses. A decision of
one rank alone would be an error on all of them that names the optimizer.

After Radford, Metz and Chintala (arXiv 1511.06434). Trains on CIFAR-10's images, or on
generated ones with --smoke. Rank 0 writes a sheet of samples into --out each epoch.
"""

import argparse
import functools
import hashlib
import pathlib

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions
from PIL import Image


def generator(n_noise, width):
    """Return a network from noise (N, n_noise) to images (N, 3, 32, 32) in -1 to 1."""
    w = chainer.initializers.Normal(0.02)
    layers = [L.Linear(n_noise, 4 * 4 * 4 * width, initialW=w, nobias=True)]
    layers += [functools.partial(F.reshape, shape=(-1, 4 * width, 4, 4))]
    layers += [L.BatchNormalization(4 * width), F.relu]
    for n_in, n_out in (4 * width, 2 * width), (2 * width, width):
        layers += [L.Deconvolution2D(n_in, n_out, 4, 2, 1, nobias=True, initialW=w)]
        layers += [L.BatchNormalization(n_out), F.relu]
    layers += [L.Deconvolution2D(width, 3, 4, 2, 1, initialW=w), F.tanh]
    return chainer.Sequential(*layers)


def discriminator(width):
    """Return a network from images to one number each: above 0 if it seems real."""
    w = chainer.initializers.Normal(0.02)
    layers = [L.Convolution2D(3, width, 4, 2, 1, initialW=w), F.leaky_relu]
    for n_in, n_out in (width, 2 * width), (2 * width, 4 * width):
        layers += [L.Convolution2D(n_in, n_out, 4, 2, 1, nobias=True, initialW=w)]
        layers += [L.BatchNormalization(n_out), F.leaky_relu]
    return chainer.Sequential(*layers, L.Linear(4 * 4 * 4 * width, 1, initialW=w))


class Updater(training.updaters.StandardUpdater):
    """Trains both networks on each batch.

    Args:
        iterator: of real images.
        optimizers: multi-node ones, ``"gen"`` and ``"dis"``.
        comm: their communicator.
        n_noise: numbers that an image is generated from.
        pause_below: the discriminator makes no step while its loss is below.
        device: of the models.
    """

    def __init__(self, iterator, optimizers, comm, n_noise, pause_below, device):
        super().__init__(iterator, optimizers, device=device)
        self.comm, self.n_noise, self.pause_below = comm, n_noise, pause_below

    def generate(self, n_images):
        """Return images from fresh noise; each rank draws its own."""
        noise = self.device.xp.random.uniform(-1, 1, (n_images, self.n_noise))
        return self.get_optimizer("gen").target(noise.astype(np.float32))

    def update_core(self):
        batch = self.get_iterator("main").next()
        real = self.converter(batch, self.device)
        gen, dis = self.get_optimizer("gen"), self.get_optimizer("dis")
        fake = self.generate(len(batch))
        verdict = dis.target(fake)

        gen_loss = F.mean(F.softplus(-verdict))
        gen.target.cleargrads()
        gen_loss.backward()
        fake.unchain_backward()

        dis_loss = F.mean(F.softplus(-dis.target(real))) + F.mean(F.softplus(verdict))
        dis.target.cleargrads()  # also of what the generator's loss has left there
        dis_loss.backward()

        gen.update()
        mean_loss = self.comm.allreduce_obj(float(dis_loss.array)) / self.comm.size
        pauses = mean_loss < self.pause_below  # the same on all ranks
        if not pauses:
            dis.update()
        chainer.report({"gen/loss": gen_loss, "dis/loss": dis_loss, "paused": pauses})


def sample_sheet(updater, path):
    """Return an extension that writes 64 generated images into one picture."""

    @training.make_extension(trigger=(1, "epoch"))
    def write(trainer):
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            images = cuda.to_cpu(updater.generate(64).array)
        rows = images.reshape(8, 8, 3, 32, 32).transpose(0, 3, 1, 4, 2)
        pixels = (rows.reshape(256, 256, 3) * 127.5 + 127.5).astype(np.uint8)
        Image.fromarray(pixels).save(path)

    return write


def load(args):
    """Return float32 images (N, 3, 32, 32) from -1 to 1."""
    if not args.smoke:
        train, _ = chainer.datasets.get_cifar10(withlabel=False, scale=2.0)
        return train - 1
    draw = np.random.RandomState(0)
    colours = np.array([0.8, -0.2, -0.8]) + draw.normal(0, 0.1, (256, 3))
    noise = draw.normal(0, 0.05, (256, 3, 32, 32))
    return (colours[:, :, None, None] + noise).clip(-1, 1).astype(np.float32)


def digest(model):
    """Return a digest of every bit of the parameters."""
    sha256 = hashlib.sha256()
    for path, param in sorted(model.namedparams()):
        sha256.update(path.encode() + cuda.to_cpu(param.array).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="DCGAN with Chainer, on several ranks")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--noise", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help="channels at 16 pixels")
    parser.add_argument("--alpha", type=float, default=2e-4, help="step size of Adam")
    parser.add_argument("--pause-below", type=float, default=0.3)
    parser.add_argument("--batchsize", type=int, default=128, help="of all ranks")
    parser.add_argument("--epoch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/dcgan")
    parser.add_argument("--smoke", action="store_true", help="small networks and data")
    args = parser.parse_args()
    if args.smoke:
        args.noise, args.width, args.batchsize, args.epoch = 8, 4, 32, 4
        args.alpha, args.pause_below = 4e-3, 0.9

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    with chainermn_ng.shared_seed(args.seed):
        models = {
            "gen": generator(args.noise, args.width),
            "dis": discriminator(args.width),
        }
    optimizers = {}
    for name, model in models.items():
        model.to_device(device)
        adam = chainer.optimizers.Adam(alpha=args.alpha, beta1=0.5)
        optimizers[name] = chainermn_ng.create_multi_node_optimizer(adam, comm)
        optimizers[name].setup(model)
        # The updater calls backward() itself, so the weights must be alike before.
        comm.bcast_data(model)

    images = chainermn_ng.run_once_per_host(comm, load, args)
    shard = chainermn_ng.scatter_dataset(images, comm, shuffle=True, seed=args.seed)
    batchsize = max(args.batchsize // comm.size, 1)
    iterator = chainer.iterators.SerialIterator(shard, batchsize)
    updater = Updater(iterator, optimizers, comm, args.noise, args.pause_below, device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        columns = ["epoch", "iteration", "gen/loss", "dis/loss", "paused"]
        trainer.extend(extensions.PrintReport(columns))
        trainer.extend(sample_sheet(updater, pathlib.Path(args.out) / "samples.png"))
    trainer.run()

    digests = comm.allgather_obj([digest(model) for model in models.values()])
    steps = {name: optimizer.t for name, optimizer in optimizers.items()}
    if comm.rank == 0:
        print(f"steps of the generator: {steps['gen']}, discriminator: {steps['dis']}")
        for rank, (gen, dis) in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {gen} {dis}")


if __name__ == "__main__":
    main()
