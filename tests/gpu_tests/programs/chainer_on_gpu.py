"""Chainer on CuPy: ``chainer_on_gpu.py gpu|cpu``; results are compared with NumPy's.

With ``cpu`` both sides are NumPy (for tests of this program).
"""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import chainermn_ng  # first: it makes Chainer importable

# isort: split
import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from chainer.backends import cuda
from mpi4py import MPI

from chainermn_ng.functions.batch_normalization import (
    SumOverRanks,
    multi_node_batch_normalization,
)
from gpu_tests.results import tell_detail

RANDOM = np.random.RandomState(0)
X = RANDOM.uniform(-1, 1, (8, 6)).astype("f")
IMAGES = RANDOM.uniform(-1, 1, (2, 3, 6, 6)).astype("f")
LABELS = RANDOM.randint(0, 6, 8).astype("i")
BITS = RANDOM.randint(0, 2, X.shape).astype("i")


def _weights(*shape: int) -> np.ndarray:
    return RANDOM.uniform(-1, 1, shape).astype("f")


@functools.cache
def _sum_over_ranks() -> SumOverRanks:
    # Through host memory: this program needs no NCCL.
    return SumOverRanks(chainermn_ng.create_communicator("flat"), "mpi")


def _normalized(x: Any, gamma: Any, beta: Any) -> chainer.Variable:
    return multi_node_batch_normalization(x, gamma, beta, _sum_over_ranks())


def _penalty(x: Any, gamma: Any, beta: Any) -> chainer.Variable:
    y = _normalized(x, gamma, beta) ** 3
    return chainer.grad([y], [x], enable_double_backprop=True)[0]


#: Name: function and its arguments.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "linear": (F.linear, X, _weights(5, 6), _weights(5)),
    "relu": (F.relu, X),
    "sigmoid": (F.sigmoid, X),
    "softmax": (F.softmax, X),
    "softmax cross entropy": (F.softmax_cross_entropy, X, LABELS),
    "sigmoid cross entropy": (F.sigmoid_cross_entropy, X, BITS),
    "lstm": (F.lstm, _weights(8, 3), _weights(8, 12)),
    "embed": (F.embed_id, LABELS, _weights(6, 3)),
    "slices": (lambda x: x[1:, ::2], X),
    "rows": (lambda x: F.get_item(x, ([0, 2, 2],)), X),
    "scatter": (lambda x, y: F.scatter_add(x, [0, 2], y), X, _weights(2, 6)),
    "convolution": (F.convolution_2d, IMAGES, _weights(4, 3, 3, 3), _weights(4)),
    "max pooling": (lambda x: F.max_pooling_2d(x, 2), IMAGES),
    "average pooling": (lambda x: F.average_pooling_2d(x, 2), IMAGES),
    "batch normalization": (F.batch_normalization, X, _weights(6), _weights(6)),
    "multi-node normalization": (_normalized, X, _weights(6), _weights(6)),
    "gradient of that": (_penalty, X, _weights(6), _weights(6)),
    "layer normalization": (F.layer_normalization, X, _weights(6), _weights(6)),
    "concatenation": (lambda x, y: F.concat([x, y]), X, X),
    "product": (F.matmul, X, _weights(6, 4)),
    "arithmetic": (lambda x, y: (x + y) * x / (y + 3) - 2**x + abs(y), X, X + 1),
    "mean": (F.mean, X),
}
OPTIMIZERS = ("SGD", "MomentumSGD", "Adam", "AdaGrad", "RMSprop")


def results_of(function: Callable[..., Any], args: Any, device: Any) -> list[Any]:
    """Return outputs and gradients of a function on a device, as NumPy arrays."""
    given = [device.send(array) for array in args]
    variables = [chainer.Variable(a) if a.dtype.kind == "f" else a for a in given]
    outputs = function(*variables)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(F.sum(y * y) for y in outputs).backward()
    grads = [v.grad for v in variables if isinstance(v, chainer.Variable)]
    return [cuda.to_cpu(array) for array in (*(y.array for y in outputs), *grads)]


def compare(what: str, host: list[Any], device: list[Any]) -> None:
    """Expect the same numbers, but for rounding.

    Raises:
        AssertionError: they differ.
    """
    for expected, got in zip(host, device, strict=True):
        assert got.dtype == expected.dtype, (what, got.dtype)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=what)


def trained(name: str, device: Any) -> list[Any]:
    """Return a model's parameters after some steps of an optimizer."""
    with chainermn_ng.shared_seed(3):
        model = L.Classifier(chainer.Sequential(L.Linear(6, 7), F.tanh, L.Linear(7, 6)))
    model.to_device(device)
    optimizer = getattr(chainer.optimizers, name)()
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
    for _ in range(3):
        optimizer.update(model, device.send(X), device.send(LABELS))
    return [cuda.to_cpu(param.array) for _, param in sorted(model.namedparams())]


def check_random_numbers(xp: Any) -> None:
    """Expect that seeds decide what is drawn, and that a block leaves no trace."""
    chainermn_ng.set_seed(5)
    expected = float(xp.random.uniform())
    chainermn_ng.set_seed(5)
    with chainermn_ng.shared_seed(6):
        inside = float(xp.random.uniform())
    assert float(xp.random.uniform()) == expected
    with chainermn_ng.shared_seed(6):
        assert float(xp.random.uniform()) == inside != expected


def check_snapshots(device: Any) -> None:
    """Save a model and its optimizer from the device; load them there."""
    models = [L.Linear(6, 3), L.Linear(6, 3)]
    optimizers = [chainer.optimizers.Adam().setup(model) for model in models]
    for model in models:
        model.to_device(device)
    optimizers[0].update(lambda x: F.sum(models[0](x) ** 2), device.send(X))
    with tempfile.TemporaryDirectory() as folder:
        for i, saved in enumerate((models[0], optimizers[0])):
            path = pathlib.Path(folder) / f"{i}.npz"
            chainer.serializers.save_npz(path, saved)
            loaded = (models[1], optimizers[1])[i]
            chainer.serializers.load_npz(path, loaded)
    assert optimizers[1].t == 1
    assert models[1].device == device
    first, second = ([cuda.to_cpu(p.array) for p in m.params()] for m in models)
    assert all(map(np.array_equal, first, second))


def main() -> None:
    """Run all comparisons."""
    host = chainer.get_device("@numpy")
    device = chainermn_ng.choose_device(MPI.COMM_WORLD, gpu=sys.argv[1] == "gpu")
    for name, (function, *args) in FUNCTIONS.items():
        compare(name, *(results_of(function, args, d) for d in (host, device)))
    for name in OPTIMIZERS:
        compare(name, *(trained(name, d) for d in (host, device)))
    check_random_numbers(device.xp)
    check_snapshots(device)
    _sum_over_ranks().comm.finalize()
    tell_detail(f"{len(FUNCTIONS)} functions, {len(OPTIMIZERS)} optimizers as on NumPy")


if __name__ == "__main__":
    main()
