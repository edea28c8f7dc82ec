# Data-parallel training in the style of ChainerMN 7: devices by specifiers, batch
# normalization over all ranks, a synchronized iterator, a checkpointer that resumes.
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from chainermn.extensions import create_multi_node_checkpointer
from points import get_points, report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", "-d", default="-1")
    parser.add_argument("--epoch", "-e", type=int, default=5)
    parser.add_argument("--out", "-o", default="result")
    args = parser.parse_args()

    comm = (
        chainermn.create_communicator("pure_nccl", allreduce_grad_dtype=np.float16)
        if args.device != "-1"
        else chainermn.create_communicator("naive")
    )
    device = chainer.get_device(
        "@cupy:{}".format(comm.intra_rank) if args.device != "-1" else "@numpy"
    )
    device.use()

    model = L.Classifier(
        chainermn.links.create_mnbn_model(
            chainer.Sequential(
                L.Linear(16, 20), L.BatchNormalization(20), F.relu, L.Linear(20, 4)
            ),
            comm,
        )
    )
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(
        actual_optimizer=chainer.optimizers.MomentumSGD(0.05),
        communicator=comm,
        double_buffering=False,
        zero_fill=True,
    )
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))

    begin, end = chainermn.scatter_index(256, comm)
    train = get_points(256, 0)[begin:end]
    train_iter = chainermn.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(train, 16), comm
    )
    test = chainermn.scatter_dataset(
        get_points(63, 1), comm, shuffle=False, force_equal_length=False
    )
    test_iter = chainer.iterators.SerialIterator(test, 16, repeat=False, shuffle=False)

    updater = training.updaters.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = chainermn.create_multi_node_evaluator(
        extensions.Evaluator(test_iter, model, device=device), comm
    )
    trainer.extend(evaluator)
    checkpointer = create_multi_node_checkpointer(
        name="points", comm=comm, cp_interval=2, gc_interval=2, path=args.out
    )
    checkpointer.maybe_load(trainer, optimizer)
    if comm.rank == 0:
        print("RESUMED AT", trainer.updater.iteration, flush=True)
    trainer.extend(checkpointer, trigger=(1, "epoch"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(), trigger=(1, "epoch"))
        trainer.extend(extensions.PrintReport(["epoch", "main/loss"]))
    trainer.run()
    report(comm, model, evaluator()["validation/main/accuracy"])


if __name__ == "__main__":
    main()
