"""A training run in which the last rank dies, or raises, after some steps."""

import os
import signal
import sys

import chainermn_ng  # first: it makes Chainer importable

# isort: split
import chainer
import chainer.links as L
import numpy as np

communicator = chainermn_ng.create_communicator("two_dimensional")
model = L.Classifier(L.Linear(4, 3))
optimizer = chainermn_ng.create_multi_node_optimizer(
    chainer.optimizers.SGD(), communicator
)
optimizer.setup(model)
x, t = np.ones((2, 4), "float32"), np.zeros(2, "int32")
for step in range(1000):
    if step == 3 and communicator.rank == communicator.size - 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the data of step 3 are broken")
    optimizer.update(model, x, t)
print("went on without the rank that failed")
