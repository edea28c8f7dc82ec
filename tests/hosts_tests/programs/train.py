"""Train a small Chainer model with each of the named communicators.

``train.py OUT.npz NAME...``: rank 0 writes the weights of each run; all ranks report
whether theirs are the same to the bit. Without names one process trains on the whole
batches, with Chainer alone, and the run is called ``""``.
"""

import sys

import chainermn_ng  # first: it makes Chainer importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

N_STEPS = 6
BATCH = 12  # shared out evenly to 1, 2, 3 or 4 ranks


class Classifier(chainer.Chain):
    """Two layers, the first sized by its first batch, and one for the classes."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(None, 31)
            self.second = L.Linear(31, 17)
            self.out = L.Linear(17, 5)

    def forward(self, x, t):
        h = F.tanh(self.second(F.relu(self.hidden(x))))
        return F.softmax_cross_entropy(self.out(h), t)


def _weights(communicator) -> dict[str, np.ndarray]:
    rank, size = (communicator.rank, communicator.size) if communicator else (0, 1)
    data = np.random.RandomState(7)
    x = data.normal(size=(N_STEPS, BATCH, 23)).astype("float32")
    t = data.randint(5, size=(N_STEPS, BATCH)).astype("int32")
    np.random.seed(11 + rank)  # ranks begin apart; rank 0's weights must win
    model = Classifier()
    model(x[0, :1], t[0, :1])
    optimizer = chainer.optimizers.MomentumSGD(lr=0.1)
    if communicator:
        communicator.bcast_data(model)
        optimizer = chainermn_ng.create_multi_node_optimizer(optimizer, communicator)
    optimizer.setup(model)
    for step in range(N_STEPS):
        optimizer.update(model, x[step, rank::size], t[step, rank::size])
    return {path: param.array for path, param in sorted(model.namedparams())}


def _is_same_on_all_ranks(mpi_comm, weights) -> bool:
    mine = b"".join(array.tobytes() for array in weights.values())
    return mine == mpi_comm.bcast(mine, root=0)


def main() -> None:
    """Run what the command line asks for."""
    out, *names = sys.argv[1:]
    if not names:
        np.savez(out, **{f":{path}": a for path, a in _weights(None).items()})
        return
    from mpi4py import MPI
    from report import print_by_rank

    runs, same = {}, {}
    for name in names:
        communicator = chainermn_ng.create_communicator(name, timeout_s=20)
        weights = _weights(communicator)
        same[name] = _is_same_on_all_ranks(MPI.COMM_WORLD, weights)
        runs.update({f"{name}:{path}": array for path, array in weights.items()})
    if MPI.COMM_WORLD.rank == 0:
        np.savez(out, **runs)
    print_by_rank(MPI.COMM_WORLD, same)


if __name__ == "__main__":
    main()
