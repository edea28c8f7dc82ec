"""A small training whose rank 1 fails at its third iteration, in a way and a place.

    python faults.py WHAT WHERE FOLDER

``WHAT`` is a name in ``FAULTS`` or one of those that a place itself knows; ``WHERE`` is
a part of the program. Each rank writes what it prints to ``FOLDER/rank<r>.txt``, and
rank 1 the time of the failure to ``FOLDER/failed_at``.
"""

import os
import pathlib
import resource
import signal
import sys
import threading
import time

WHAT, WHERE, FOLDER = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
RANK = int(next(os.environ[name] for name in VARIABLES if name in os.environ))
OUTPUT = os.open(FOLDER / f"rank{RANK}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for descriptor in (1, 2):
    os.dup2(OUTPUT, descriptor)

import chainermn_ng  # noqa: E402

import chainer  # noqa: E402
import numpy as np  # noqa: E402
from chainer import links as L  # noqa: E402
from chainer import training  # noqa: E402
from chainer.training import extensions  # noqa: E402

FAILS_AT = 3
TIMEOUT_S = 4.0


class Broken(Exception):
    """What a user's code raises."""


def raise_broken():
    raise Broken("by the user's code")


def raise_in_a_thread():
    threading.Thread(target=raise_broken).start()
    time.sleep(60)


def raise_and_catch():
    try:
        raise_broken()
    except Broken:
        print("caught")


FAULTS = {
    "exception": raise_broken,
    "exception, caught": raise_and_catch,
    "exception in a thread": raise_in_a_thread,
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "KeyboardInterrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stuck": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def note_time():
    (FOLDER / "failed_at").write_text(repr(time.time()))


def fail_in(where):
    """Fail if this is the place, on rank 1."""
    if where == WHERE and RANK == 1 and WHAT in FAULTS:
        note_time()
        FAULTS[WHAT]()


class Model(L.Classifier):
    """A linear classifier, and an array that makes its snapshots large."""

    def __init__(self, n_classes):
        super().__init__(L.Linear(4, n_classes))
        self.ballast = np.random.RandomState(0).bytes(1 << 20)
        self.n_calls = 0
        self.n_saved = 0

    def forward(self, *batch):
        if chainer.config.train:
            self.n_calls += 1
            if self.n_calls == FAILS_AT:
                fail_in("user code")
        else:
            fail_in("evaluator")
        return super().forward(*batch)

    def serialize(self, serializer):
        super().serialize(serializer)
        if isinstance(serializer, chainer.Serializer):
            self.n_saved += 1
            serializer("ballast", np.frombuffer(self.ballast, np.uint8))
            if self.n_saved == FAILS_AT:
                fail_in("snapshot")


class Faulty:
    """Fails while it is pickled, inside of a collective."""

    def __reduce__(self):
        fail_in("collective")
        return int, ()


class Updater(training.updaters.StandardUpdater):
    """Skips a step if it is told to."""

    def update_core(self):
        if (WHAT, RANK, self.iteration) == ("skipped step", 1, FAILS_AT - 1):
            note_time()
            return
        super().update_core()


def in_an_extension(comm):
    """Return the extension that fails."""

    def extension(trainer):
        if trainer.updater.iteration != FAILS_AT:
            return
        fail_in("extension")
        if RANK == 1 and WHAT in ("other shape", "call on one rank", "full disk"):
            note_time()
        if WHERE == "collective":
            if WHAT == "other shape":
                comm.allreduce(np.zeros(3 + RANK))
            comm.allgather_obj(Faulty())
        elif (WHERE, WHAT, RANK) == ("extension", "call on one rank", 1):
            comm.allreduce(np.zeros(3))
        elif (WHAT, RANK) == ("full disk", 1):
            limit = 1 << 19  # bytes of a file: the system refuses more, as a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return extension


def make_trainer(comm, n_epochs):
    """Return a trainer with an evaluator, a failing extension and a checkpointer."""
    n_classes = 4 if (WHAT, WHERE, RANK) == ("other shape", "user code", 1) else 3
    if n_classes == 4:
        note_time()
    model = Model(n_classes)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.01), comm
    )
    optimizer.setup(model)
    x = np.random.RandomState(1).rand(32, 4).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, np.arange(32, dtype=np.int32) % 3)
    shard = chainermn_ng.scatter_dataset(data, comm, shuffle=True, seed=0)
    iterator = chainer.iterators.SerialIterator(shard, 4)
    trainer = training.Trainer(
        Updater(iterator, optimizer), (n_epochs, "epoch"), FOLDER
    )
    evaluator = extensions.Evaluator(
        chainer.iterators.SerialIterator(shard, 8, repeat=False, shuffle=False), model
    )
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(
        in_an_extension(comm), "fault", trigger=(1, "iteration"), priority=400
    )
    folder = FOLDER / "snapshots"
    if WHAT == "read-only folder" and RANK == 1:
        folder = "/proc"  # root may write to all others
        note_time()
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, path=str(folder)
    )
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    return trainer, checkpointer


def kill_in_the_middle_of_a_write():
    """Let rank 1 die when its third snapshot is written and not yet on the disk."""
    fsync, n_calls = os.fsync, [0]

    def die(descriptor):
        n_calls[0] += 1
        if n_calls[0] == FAILS_AT:
            fail_in("snapshot's file")
        fsync(descriptor)

    os.fsync = die


def damage_the_last_snapshot(comm):
    """Train for an epoch, then cut rank 1's newest file."""
    trainer, _ = make_trainer(comm, 1)
    trainer.run()
    comm.barrier()
    if RANK == 1:
        note_time()
        newest = FOLDER / "snapshots" / "run.1.4"
        os.truncate(newest, newest.stat().st_size // 2)
    comm.barrier()


def main():
    fail_in("before the communicator")
    comm = chainermn_ng.create_communicator("naive", timeout_s=TIMEOUT_S)
    if WHERE == "snapshot's file":
        kill_in_the_middle_of_a_write()
    if WHAT == "damaged snapshot":
        damage_the_last_snapshot(comm)
    trainer, checkpointer = make_trainer(comm, 2)
    checkpointer.maybe_load(trainer)
    trainer.run()
    print(f"trained to iteration {trainer.updater.iteration}")


main()
