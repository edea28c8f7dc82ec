"""Train ResNet-50 or another network on ImageNet, with large batches.

    mpiexec -n 8 python examples/imagenet/train_imagenet.py --gpu --train train.txt \\
        --val val.txt --root images --allreduce-grad-dtype float16
    mpiexec -n 2 python examples/imagenet/train_imagenet.py --smoke \\
        --allreduce-grad-dtype float16

Each line of the two lists has the path of an image, relative to --root, and the number
of its class. --smoke writes small images of its own and trains a narrow network.

The recipe is that of Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677):
a learning rate proportional to the batch of all ranks, reached in five epochs of
warm-up; no decay of biases and of batch normalization. Of their augmentation only
crops and mirroring are here. Images are read by worker processes; gradients may travel
as float16. Started again, it goes on from the newest snapshot of the same network in
--out, which is result/imagenet-ARCH unless it is given.
"""

import argparse
import functools
import multiprocessing
import multiprocessing.forkserver
import pathlib

import chainermn_ng

import chainer
import numpy as np
from chainer import links as L
from chainer import training
from chainer.training import extensions
from models import MODELS
from PIL import Image, ImageOps

MEAN = np.array([123.7, 116.3, 103.5], np.float32).reshape(3, 1, 1)
STD = np.array([58.4, 57.1, 57.4], np.float32).reshape(3, 1, 1)


def read_list(path):
    """Return the pairs of a list: path of an image, class."""
    lines = pathlib.Path(path).read_text().splitlines()
    return [(name, int(label)) for name, label in map(str.rsplit, lines)]


def read_image(root, size, sample):
    """Return an image as uint8 array (3, size, size), and its class. In the workers."""
    path, label = sample
    with Image.open(pathlib.Path(root) / path) as image:
        square = ImageOps.fit(image.convert("RGB"), (size, size))
    return np.asarray(square).transpose(2, 0, 1), label


def crop(image, size, augment):
    """Cut a square out of an image: anywhere and mirrored at times, or the middle."""
    margin = image.shape[1] - size
    if augment:
        top, left = np.random.randint(margin + 1, size=2)
        image = image[:, :, :: np.random.choice((-1, 1))]
    else:
        top = left = margin // 2
    return image[:, top : top + size, left : left + size]


def make_converter(size, augment):
    """Return what makes float32 images (N, 3, size, size) and labels of a batch.

    It runs in the rank itself, so augmentation follows the rank's seed, whichever
    worker read an image; to the GPU the pixels travel as bytes.
    """

    @chainer.dataset.converter()
    def convert(batch, device):
        images = device.send(np.stack([crop(x, size, augment) for x, _ in batch]))
        labels = device.send(np.array([label for _, label in batch], np.int32))
        return (images - device.send(MEAN)) / device.send(STD), labels

    return convert


def learning_rate(epoch, args):
    """Return the rate at a point of the training, in epochs."""
    target = args.lr * args.batchsize / args.lr_batchsize
    if epoch < args.warmup and target > args.lr:
        return args.lr + (target - args.lr) * epoch / args.warmup
    drops = (args.epoch / 3, args.epoch * 2 / 3, args.epoch * 8 / 9)
    return target * 0.1 ** sum(epoch >= drop for drop in drops)


def write_smoke_images(folder):
    """Write 64 images to train and 16 to validate with: classes are colours."""
    draw = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    colours = np.array([(200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60)])
    for name, n_images in ("train", 64), ("val", 16):
        lines = []
        for i in range(n_images):
            pixels = colours[i % 4] + draw.normal(0, 25, (40, 48, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / f"{name}{i}.png")
            lines.append(f"{name}{i}.png {i % 4}\n")
        (folder / f"{name}.txt").write_text("".join(lines))


def parse_arguments():
    parser = argparse.ArgumentParser(description="ImageNet with Chainer, large batches")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--allreduce-grad-dtype", help="of gradients on their way")
    parser.add_argument("--train", help="list of images and classes")
    parser.add_argument("--val", help="the same for validation")
    parser.add_argument("--root", default=".", help="folder that the lists are about")
    parser.add_argument("--arch", choices=list(MODELS), default="resnet50")
    parser.add_argument("--width", type=float, default=1.0, help="factor on channels")
    parser.add_argument("--mnbn", action="store_true", help="normalize over all ranks")
    parser.add_argument(
        "--batchsize", type=int, help="of all ranks; 32 on each of them"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="for --lr-batchsize")
    parser.add_argument("--lr-batchsize", type=int, default=256)
    parser.add_argument("--warmup", type=float, default=5, help="epochs")
    parser.add_argument("--epoch", type=int, default=90)
    parser.add_argument("--loaders", type=int, default=4, help="workers of each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", help="result/imagenet-ARCH, -smoke with --smoke")
    parser.add_argument("--smoke", action="store_true", help="small images and network")
    args = parser.parse_args()
    args.name = f"imagenet-{args.arch}" + ("-smoke" if args.smoke else "")
    args.out = args.out or f"result/{args.name}"
    if args.smoke:
        args.root = pathlib.Path(args.out) / "smoke"
        args.train, args.val = args.root / "train.txt", args.root / "val.txt"
        args.width, args.batchsize, args.epoch, args.loaders = 0.125, 16, 3, 1
        args.lr, args.lr_batchsize, args.warmup = 0.02, 8, 1
    elif not (args.train and args.val):
        parser.error("give --train and --val, or --smoke")
    return args


def main():
    args = parse_arguments()
    # Workers come from a server that is started here, before MPI: to fork a process
    # in which MPI runs can crash or hang it.
    multiprocessing.set_start_method("forkserver")
    # What they need is imported once, not by each: new ones start at each evaluation.
    multiprocessing.set_forkserver_preload(
        ["chainermn_ng", "PIL.Image", "PIL.ImageOps"]
    )
    multiprocessing.forkserver.ensure_running()

    comm = chainermn_ng.create_communicator(
        args.communicator, allreduce_grad_dtype=args.allreduce_grad_dtype
    )
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    args.batchsize = args.batchsize or 32 * comm.size
    read_size, size, n_classes = (40, 32, 4) if args.smoke else (256, 224, 1000)

    with chainermn_ng.shared_seed(args.seed):
        network = MODELS[args.arch](n_classes, args.width)
    if args.mnbn:
        network = chainermn_ng.links.create_mnbn_model(network, comm)
    model = L.Classifier(network)
    model.to_device(device)
    # This class keeps the rate out of the momentum, as a changing rate needs.
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.CorrectedMomentumSGD(lr=args.lr, momentum=0.9), comm
    )
    optimizer.setup(model)
    for param in model.params():
        if param.name == "W":
            param.update_rule.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))

    if args.smoke:
        chainermn_ng.run_once_per_host(comm, write_smoke_images, args.root)
    batchsize = max(args.batchsize // comm.size, 1)
    iterators = {}
    for name, path in ("train", args.train), ("val", args.val):
        is_train = name == "train"
        # A few names and numbers of rank 0 travel; each rank reads its own images.
        pairs = read_list(path) if comm.rank == 0 else None
        shard = chainermn_ng.scatter_dataset(
            pairs, comm, shuffle=is_train, seed=args.seed
        )
        reader = functools.partial(read_image, args.root, read_size)
        # An order that survives loading ahead: a resumed run sees the same batches.
        order = chainermn_ng.datasets.SeededOrder(args.seed) if is_train else None
        iterators[name] = chainer.iterators.MultiprocessIterator(
            chainer.datasets.TransformDataset(shard, reader),
            batchsize,
            repeat=is_train,
            shuffle=None if is_train else False,
            n_processes=args.loaders,
            order_sampler=order,
        )

    updater = training.StandardUpdater(
        iterators["train"], optimizer, make_converter(size, True), device=device
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)

    @training.make_extension(priority=training.PRIORITY_EDITOR)
    def set_learning_rate(trainer):
        optimizer.lr = learning_rate(trainer.updater.epoch_detail, args)

    set_learning_rate.initialize = set_learning_rate  # also before the first step
    trainer.extend(set_learning_rate)
    # Once an epoch: running statistics of all ranks, evaluation, comparison, snapshot.
    trainer.extend(chainermn_ng.extensions.AllreducePersistent(model, comm))
    evaluator = extensions.Evaluator(
        iterators["val"], model, make_converter(size, False), device
    )
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(chainermn_ng.extensions.CheckState())
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        args.name, comm, cp_interval=2, gc_interval=1
    )
    trainer.extend(checkpointer, trigger=(1, "epoch"))
    trainer.extend(extensions.observe_lr())
    columns = ["epoch", "lr", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    # Stand-ins on the other ranks make the snapshots of all ranks alike.
    for report in extensions.LogReport(), extensions.PrintReport(columns):
        trainer.extend(chainermn_ng.extensions.rank_zero_only(report))
    resumed = checkpointer.maybe_load(trainer)
    if comm.rank == 0 and resumed is not None:
        is_complete = updater.epoch_detail >= args.epoch
        done = "nothing left to do; " if is_complete else ""
        print(f"{done}resumed at iteration {resumed}", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
