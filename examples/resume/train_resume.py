"""Train where the job may be ended at any time, and go on from where it was.

    mpiexec -n 2 python examples/resume/train_resume.py

When a rank gets SIGTERM, which is how Slurm and Kubernetes announce that they will take
the machine away, all ranks finish the iteration, save a snapshot and leave with status
75: start the same line again, and the training goes on with the same bits as if nothing
had happened. Snapshots are saved every --interval iterations as well, for ends that
nobody announces; what is newest and whole on all ranks is resumed.

Send the signal to ranks, as examples/slurm/train_resume.sh does; mpiexec itself would
kill them. At the end of the training the snapshots stay: a later start with a larger
--epoch goes on from there. Those of --smoke have a name and a folder of their own.
"""

import argparse
import hashlib
import os
import signal
import sys

import chainermn_ng

import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions


class MLP(chainer.Chain):
    """Three fully connected layers, with dropout: its masks go on as well."""

    def __init__(self, n_units, n_out):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(64, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, n_out)

    def forward(self, x):
        h = F.dropout(F.relu(self.l1(x)), 0.2)
        return self.l3(F.dropout(F.relu(self.l2(h)), 0.2))


class Preemption(training.Extension):
    """Saves a snapshot and ends the training once any rank has got SIGTERM.

    The ranks get it at different moments, or only one does: after each iteration they
    agree whether one has, so that all of them save the same iteration.

    Args:
        comm: communicator of the ranks that train.
        checkpointer: saves their snapshots.
        end: when the training is done, such as ``(20, "epoch")``.

    Attributes:
        has_come (bool): the same on all ranks.
    """

    trigger = 1, "iteration"
    priority = -300  # the last extension: the snapshot holds what the others have done

    def __init__(self, comm, checkpointer, end):
        self.comm, self.checkpointer = comm, checkpointer
        self._is_end = training.get_trigger(end)
        self.has_come = self._is_signalled = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number, frame):
        self._is_signalled = True

    def __call__(self, trainer):
        self.has_come = bool(self.comm.allreduce_obj(self._is_signalled, "max"))
        if self.has_come:
            self.checkpointer.save(trainer, trainer.updater.iteration)

    def is_over(self, trainer):
        """Tell whether to stop: the trainer's stop trigger."""
        return self.has_come or self._is_end(trainer)


def load():
    """Return training and validation data: pairs of a float32 image and a label."""
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
    parser = argparse.ArgumentParser(description="Training that may be interrupted")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--batchsize", type=int, default=100, help="of all ranks")
    parser.add_argument("--epoch", type=int, help="100, or 3 with --smoke")
    parser.add_argument("--unit", type=int, default=200)
    parser.add_argument("--interval", type=int, default=200, help="of snapshots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", help="result/resume, or result/resume-smoke")
    parser.add_argument("--smoke", action="store_true", help="a small network")
    args = parser.parse_args()
    name = "resume-smoke" if args.smoke else "resume"
    args.out = args.out or f"result/{name}"
    args.epoch = args.epoch or (3 if args.smoke else 100)
    if args.smoke:
        args.unit, args.interval = 32, 10

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)
    model = L.Classifier(MLP(args.unit, 10))
    model.to_device(device)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm
    )
    optimizer.setup(model)

    train, test = chainermn_ng.run_once_per_host(comm, load)
    train = chainermn_ng.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    test = chainermn_ng.scatter_dataset(test, comm)
    batchsize = max(args.batchsize // comm.size, 1)
    train_iter = chainer.iterators.SerialIterator(train, batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, batchsize, repeat=False, shuffle=False
    )

    checkpointer = chainermn_ng.create_multi_node_checkpointer(name, comm)
    preemption = Preemption(comm, checkpointer, end=(args.epoch, "epoch"))
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, preemption.is_over, out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    columns = ["epoch", "iteration", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy"]
    # Stand-ins on the other ranks make the snapshots of all ranks alike.
    for report in extensions.LogReport(), extensions.PrintReport(columns):
        trainer.extend(chainermn_ng.extensions.rank_zero_only(report))

    def is_complete(trainer):
        return trainer.updater.epoch_detail >= args.epoch

    def is_snapshot_due(trainer):
        return is_complete(trainer) or trainer.updater.iteration % args.interval == 0

    trainer.extend(checkpointer, trigger=is_snapshot_due)
    trainer.extend(preemption)

    resumed = checkpointer.maybe_load(trainer)
    if comm.rank == 0 and resumed is not None:
        done = "nothing left to do; " if is_complete(trainer) else ""
        print(f"{done}resumed at iteration {resumed}", flush=True)
    trainer.run()

    if preemption.has_come:
        if comm.rank == 0:
            print(f"interrupted at iteration {updater.iteration}", flush=True)
        comm.barrier()  # the first rank that leaves with a status ends the job
        sys.exit(os.EX_TEMPFAIL)
    digests = comm.allgather_obj(digest(model))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {text}")


if __name__ == "__main__":
    main()
