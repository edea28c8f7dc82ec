# A network over two ranks in the style of ChainerMN 6: MultiNodeChainList, an empty
# data set on the rank that only computes, an evaluator of such a network, and a
# multi-node iterator.
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.datasets
import chainermn.functions
from chainer import training
from chainer.training import extensions
from points import get_points, report


class Lower(chainer.Chain):
    def __init__(self):
        super(Lower, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(16, 20)

    def __call__(self, x):
        return F.relu(self.l1(x))


class Upper(chainer.Chain):
    def __init__(self):
        super(Upper, self).__init__()
        with self.init_scope():
            self.l2 = L.Linear(20, 4)

    def __call__(self, h):
        return self.l2(h)


class First(chainermn.MultiNodeChainList):
    def __init__(self, comm):
        super(First, self).__init__(comm=comm)
        self.add_link(Lower(), rank_in=None, rank_out=1)
        self.add_link(Upper(), rank_in=1, rank_out=None)


class Second(chainermn.MultiNodeChainList):
    def __init__(self, comm):
        super(Second, self).__init__(comm)
        self.add_link(Middle(), 0, 0)


class Middle(chainer.Chain):
    def __init__(self):
        super(Middle, self).__init__()
        with self.init_scope():
            self.l3 = L.Linear(20, 20)

    def __call__(self, h):
        return F.relu(self.l3(h))


def main():
    comm = chainermn.create_communicator("naive")
    if comm.size != 2:
        raise ValueError("This example can only be executed on exactly 2 processes.")
    if comm.rank == 0:
        model = L.Classifier(First(comm))
    else:
        model = Second(comm)
    optimizer = chainer.optimizers.Adam(0.01)
    optimizer.setup(model)

    if comm.rank == 0:
        train, test = get_points(256, 0), get_points(64, 1)
    else:
        train = chainermn.datasets.create_empty_dataset(get_points(256, 0))
        test = chainermn.datasets.create_empty_dataset(get_points(64, 1))
    train_iter = chainer.iterators.SerialIterator(train, 16)
    test_iter = chainer.iterators.SerialIterator(test, 16, repeat=False, shuffle=False)

    updater = training.StandardUpdater(train_iter, optimizer)
    trainer = training.Trainer(updater, (5, "epoch"))
    evaluator = extensions.Evaluator(test_iter, model)
    trainer.extend(evaluator)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "validation/main/accuracy"]))
    trainer.run()

    samples = chainermn.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(get_points(8, comm.rank), 4), comm, 0
    )
    batch = chainer.dataset.concat_examples(samples.next())[0]
    assert (comm.bcast(batch, root=0) == batch).all()
    accuracy = 1.0
    if comm.rank == 0:
        accuracy = evaluator()["validation/main/accuracy"]
    else:
        evaluator()
    report(comm, model, accuracy)


if __name__ == "__main__":
    main()
