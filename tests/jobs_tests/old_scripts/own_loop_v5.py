# A loop without a trainer, in the style of ChainerMN 5: broadcast_data, allreduce_grad,
# the raw communicators of MPI, and the multi-node optimizer without a loss function.
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from points import get_points, report


def main():
    name = sys.argv[1]
    comm = chainermn.create_communicator(communicator_name=name, mpi_comm=None)
    model = chainer.Sequential(L.Linear(16, 20), F.relu, L.Linear(20, 4))
    comm.broadcast_data(model)
    optimizer = chainer.optimizers.MomentumSGD(lr=0.01)
    optimizer.setup(model)
    train = chainermn.scatter_dataset(
        get_points() if comm.rank == 0 else None,
        comm,
        root=0,
        shuffle=True,
        seed=3,
        max_buf_len=1024,
    )
    iterator = chainer.iterators.SerialIterator(train, 16)
    while iterator.epoch < 5:
        x, t = chainer.dataset.concat_examples(iterator.next())
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        comm.allreduce_grad(model)
        optimizer.update()
    x, t = chainer.dataset.concat_examples(get_points(64, 1)[:])
    accuracy = F.accuracy(model(x), t).data
    # Everything below has the names and positions of ChainerMN 5 to 7.
    accuracy = comm.mpi_comm.allreduce(float(accuracy)) / comm.size
    if comm.rank == 0:
        comm.send(np.arange(3, dtype=np.float32), 1, 0)
        comm.send_obj({"a": 1}, 1)
    elif comm.rank == 1:
        assert comm.recv(0, 0).tolist() == [0, 1, 2]
        assert comm.recv_obj(0) == {"a": 1}
    assert comm.bcast(np.ones(2, np.float32), root=0).sum() == 2
    assert comm.bcast_obj(comm.rank, 256 * 1024 * 1024, 0) == 0
    assert comm.split(0, comm.rank).size == comm.size
    assert (comm.inter_size, comm.intra_size) == (1, comm.size)
    report(comm, model, accuracy)


if __name__ == "__main__":
    main()
