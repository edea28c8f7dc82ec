"""What all differentiable communication shares.

Chainer runs a node's backward pass only if gradients reach it, and runs nodes in the
order of their depth in the graph. Neither is enough when other ranks wait for the
node: so every node here has an input that asks for a gradient, whatever the user's
inputs do, and a depth that makes the backward passes of one rank's communication run
in exactly the reverse of the order of its forward calls.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import chainer
import numpy as np
from chainer import backend

import communicators
from chainermn_ng.communicators import ChainerCommunicator
from communicators.dtypes import accumulation_dtype

UNREACHED = (
    "Every rank must run the backward pass through this function: where nothing of it "
    "is part of the loss, connect it by chainermn_ng.functions.pseudo_connect"
)


class Spec(NamedTuple):
    """Shape, dtype and device of an output, for a gradient of zeros."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: Any


class CommunicationNode(chainer.FunctionNode):
    """One call of a function that communicates, as a node of Chainer's graph.

    A subclass defines ``move`` (arrays in, tuple of arrays out) and ``move_back``
    (one gradient for each output in, one gradient or ``None`` for each input out).
    Both may communicate; ``move_back`` is called on every rank whose backward pass
    reaches the node.

    Attributes:
        engine (communicators.CommunicatorBase): that moves the arrays.
        meets_other_ranks (bool): says to the optimizer that its backward pass is
            collective.
    """

    meets_other_ranks = True

    def __init__(self, engine: communicators.CommunicatorBase) -> None:
        super().__init__()
        self.engine = engine
        self._specs: list[Spec] = []

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Do the forward pass."""
        raise NotImplementedError

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Do the backward pass."""
        raise NotImplementedError

    def run(self, inputs: Sequence[Any]) -> tuple[chainer.Variable, ...]:
        """Apply the node to variables or arrays, which are on one kind of device."""
        variables = [chainer.as_variable(x) for x in inputs]
        xp = backend.get_array_module(*variables)
        anchor = chainer.Variable(xp.empty(0, np.float32))
        outputs = self.apply((*variables, anchor))
        if outputs[0].creator_node is self:
            self.rank = _depth.below(self.rank)
            for output in outputs:
                output.creator_node = self
        return outputs

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call ``move`` without the anchor."""
        outputs = self.move(inputs[:-1])
        self._specs = [
            Spec(y.shape, y.dtype, backend.get_device_from_array(y)) for y in outputs
        ]
        return outputs

    def backward(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Call ``move_back``; gradients that did not come are zeros."""
        grads = [
            _zeros(spec) if grad is None else grad.array
            for grad, spec in zip(grad_outputs, self._specs, strict=True)
        ]
        found = [
            None if i not in target_input_indexes else grad
            for i, grad in enumerate(self.move_back(grads))
        ]
        if chainer.config.enable_backprop:
            found = _FirstOrderOnly.of(self.label, found)
        return (*(None if g is None else chainer.as_variable(g) for g in found), None)


class _FirstOrderOnly(chainer.FunctionNode):
    """Holds gradients that were computed without a graph; refuses to go through."""

    def __init__(self, label: str, grads: Sequence[Any]) -> None:
        super().__init__()
        self._node_label = label
        self._grads = tuple(grads)

    @classmethod
    def of(cls, label: str, grads: Sequence[Any]) -> list[Any]:
        present = [grad for grad in grads if grad is not None]
        if not present:
            return list(grads)
        xp = backend.get_array_module(*present)
        anchor = chainer.Variable(xp.empty(0, np.float32))
        variables = iter(cls(label, present).apply((anchor,)))
        return [None if grad is None else next(variables) for grad in grads]

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._grads

    def backward(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        raise RuntimeError(
            f"{self._node_label}: communication has first derivatives only; a loss "
            "cannot depend on a gradient that came through it"
        )


class _Depth(threading.local):
    """Depths for communication nodes, each greater than all before in this thread.

    Chainer's backward pass takes the deepest node first, so it takes them in the
    reverse of the forward order, without the nodes being connected. If the forward
    calls of all ranks pair up, then so do the backward passes.
    """

    def __init__(self) -> None:
        self._last = 0

    def below(self, depth: int) -> int:
        """Return a depth that is new, and not less than ``depth``."""
        self._last = max(self._last + 1, depth)
        return self._last


_depth = _Depth()


class _Calls:
    """Numbers for the calls on each communicator, to tell them apart on all ranks."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, Counter[Any]] = WeakKeyDictionary()

    def next(self, engine: communicators.CommunicatorBase, kind: Any) -> int:
        """Return how many calls of this kind there have been, this one included."""
        counts = self._counts.setdefault(engine, Counter())
        counts[kind] += 1
        return counts[kind]


calls = _Calls()


def engine_of(comm: Any, function: str) -> communicators.CommunicatorBase:
    """Return the engine of a communicator that lives as long as the graph.

    Raises:
        TypeError: it is neither this package's nor the engine's.
    """
    if isinstance(comm, ChainerCommunicator):
        return comm.engine
    if isinstance(comm, communicators.CommunicatorBase):
        return comm
    raise TypeError(
        f"{function}: expected a communicator that chainermn_ng.create_communicator "
        f"made; got {type(comm).__qualname__}"
    )


def kept_communicator(comm: Any, user: str) -> ChainerCommunicator:
    """Return a communicator that a link can hold: one that can be copied.

    Raises:
        TypeError: as :func:`engine_of`.
    """
    engine = engine_of(comm, user)
    return (
        comm if isinstance(comm, ChainerCommunicator) else ChainerCommunicator(engine)
    )


def checked_inputs(inputs: Sequence[Any], function: str) -> list[chainer.Variable]:
    """Return the inputs as variables.

    Raises:
        TypeError: one is no array or variable or has no data, or they are on several
            kinds of devices.
    """
    variables = []
    for x in inputs:
        if not isinstance(x, (chainer.Variable, *chainer.get_array_types())):
            raise TypeError(
                f"functions.{function}: expected variables or arrays; got "
                f"{type(x).__qualname__}"
            )
        variable = chainer.as_variable(x)
        if variable.array is None:
            raise TypeError(
                f"functions.{function}: the variable {variable.name!r} has no array "
                "yet (a parameter that is not initialised?)"
            )
        variables.append(variable)
    if not chainer.is_arrays_compatible([x.array for x in variables]):
        raise TypeError(
            f"functions.{function}: some of the inputs are on the CPU, others on a GPU"
        )
    return variables


def sum_arrays(arrays: Sequence[Any]) -> Any:
    """Return the sum in the dtype of the arrays; half precision sums in float32."""
    dtype = arrays[0].dtype
    total = arrays[0].astype(accumulation_dtype(dtype))
    for array in arrays[1:]:
        total += array
    return total.astype(dtype, copy=False)


def _zeros(spec: Spec) -> Any:
    with chainer.using_device(spec.device):
        return spec.device.xp.zeros(spec.shape, spec.dtype)
