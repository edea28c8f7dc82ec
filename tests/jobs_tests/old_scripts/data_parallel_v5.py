# A data-parallel script as they were written for ChainerMN 5: the hierarchical
# communicator, a GPU by comm.intra_rank, to_gpu(), device numbers.
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainer import training
from chainer.training import extensions
from points import get_points, report


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__(
            l1=L.Linear(None, n_units), l2=L.Linear(n_units, n_out)
        )

    def __call__(self, x):
        return self.l2(F.relu(self.l1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--communicator", type=str, default="hierarchical")
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", "-o", default="result")
    args = parser.parse_args()

    if args.gpu:
        comm = chainermn.create_communicator(args.communicator)
        device = comm.intra_rank
    else:
        comm = chainermn.create_communicator(args.communicator, None, None)
        device = -1
    if comm.mpi_comm.rank == 0:
        print("Num process (COMM_WORLD): {}".format(comm.size))

    model = L.Classifier(MLP(20, 4))
    if device >= 0:
        chainer.cuda.get_device_from_id(device).use()
        model.to_gpu()

    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(0.01), comm
    )
    optimizer.setup(model)

    if comm.rank == 0:
        train, test = get_points(256, 0), get_points(64, 1)
    else:
        train, test = None, None
    train = chainermn.scatter_dataset(train, comm, shuffle=True)
    test = chainermn.scatter_dataset(test, comm, 0, True)

    train_iter = chainer.iterators.SerialIterator(train, 16)
    test_iter = chainer.iterators.SerialIterator(test, 16, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (5, "epoch"), out=args.out)

    evaluator = extensions.Evaluator(test_iter, model, device=device)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "validation/main/accuracy"]))
    trainer.run()
    report(comm, model, evaluator()["validation/main/accuracy"])


if __name__ == "__main__":
    main()
