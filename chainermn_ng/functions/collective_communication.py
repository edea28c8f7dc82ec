"""Collectives that gradients pass through.

All ranks of the communicator call them, in the same order, in the forward pass; and
the backward pass of each rank must reach them. A rank whose loss does not depend on
the result has to connect it (:func:`~chainermn_ng.functions.pseudo_connect`). Every
result asks for a gradient, also where no input does.

What is differentiated is the sum of the losses of all ranks, each rank having called
``backward`` on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer
from chainer import backend

import communicators
from chainermn_ng.functions.communication_node import (
    UNREACHED,
    CommunicationNode,
    calls,
    checked_inputs,
    engine_of,
    sum_arrays,
)
from communicators.arguments import check_one_per_rank, check_root
from communicators.errors import CommunicationTimeoutError, MismatchError


class CollectiveNode(CommunicationNode):
    """A collective; all ranks agree on it in both directions.

    Attributes:
        function (str): its name.
    """

    function = ""

    def __init__(self, engine: communicators.CommunicatorBase) -> None:
        super().__init__(engine)
        self._number = 0

    @property
    def label(self) -> str:
        """Name of the function, for Chainer's hooks and errors."""
        return f"functions.{self.function}"

    def details(self) -> str:
        """Return what else must be the same on all ranks."""
        return f"enable_backprop={bool(chainer.config.enable_backprop)}"

    def prepare(self, inputs: Sequence[Any]) -> list[chainer.Variable]:
        """Check this rank's inputs."""
        return checked_inputs(inputs, self.function)

    def call(self, inputs: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
        """Agree with all ranks that the function is called, and call it.

        Raises:
            TypeError, ValueError: bad arguments on some rank; on all ranks.
            MismatchError: the ranks call different functions.
        """
        variables, error = [], None
        try:
            variables = self.prepare(inputs())
        except (TypeError, ValueError) as failure:
            error = failure
        self.engine.agree(self.label, self.details(), error=error)
        self._number = calls.next(self.engine, "collective")
        return self.run(variables)

    def backward(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Agree with all ranks on whose turn it is; then as the base class.

        Raises:
            MismatchError: another rank is elsewhere, or in another function's
                backward pass; on all ranks.
            CommunicationTimeoutError: another rank did not come.
        """
        label = f"backward pass of {self.label}, call {self._number}"
        try:
            self.engine.agree(label)
        except (MismatchError, CommunicationTimeoutError) as error:
            raise type(error)(f"{error}. {UNREACHED}") from error
        return super().backward(target_input_indexes, grad_outputs)


class RootedNode(CollectiveNode):
    """A collective that has a root.

    At the other ranks of ``bcast`` and ``scatter`` an input does not count, but it is
    an input all the same, with a gradient of zero: what it was computed from is
    reached by the backward pass on all ranks or on none.
    """

    def __init__(self, engine: communicators.CommunicatorBase, root: Any) -> None:
        super().__init__(engine)
        self.root = root
        self._ignored: list[tuple[Any, Any]] = []

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return bool(self.engine.rank == self.root)

    def details(self) -> str:
        """Return what else must be the same on all ranks."""
        return f"root={self.root}, {super().details()}"

    def prepare(self, inputs: Sequence[Any]) -> list[chainer.Variable]:
        """Check this rank's inputs, and the root."""
        check_root(self.root, self.engine.size, self.label)
        return super().prepare(inputs)

    def ignore(self, inputs: Sequence[Any]) -> None:
        """Remember inputs that get a gradient of zero."""
        self._ignored = [(x.shape, x.dtype) for x in inputs]

    def zeros(self, like: Any) -> list[Any]:
        """Return the gradients of the ignored inputs."""
        xp = backend.get_array_module(like)
        return [xp.zeros(shape, dtype) for shape, dtype in self._ignored]


class AllGather(CollectiveNode):
    """See :func:`allgather`."""

    function = "allgather"

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Collect one array a rank."""
        return tuple(self.engine.allgather(inputs[0]))

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Sum what all ranks have for this rank's array."""
        return [sum_arrays(self.engine.alltoall(tuple(grads)))]


class AllToAll(CollectiveNode):
    """See :func:`alltoall`."""

    function = "alltoall"

    def prepare(self, inputs: Sequence[Any]) -> list[chainer.Variable]:
        """Check this rank's inputs, and how many they are."""
        check_one_per_rank(inputs, self.engine.size, self.label, "variables")
        return super().prepare(inputs)

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Exchange one array with each rank."""
        return tuple(self.engine.alltoall(tuple(inputs)))

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Return each gradient to where its array came from."""
        return self.engine.alltoall(tuple(grads))


class Bcast(RootedNode):
    """See :func:`bcast`."""

    function = "bcast"

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Send the root's array to all."""
        if self.is_root:
            return (self.engine.bcast(inputs[0], root=self.root),)
        self.ignore(inputs)
        return (self.engine.bcast(None, root=self.root),)

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Sum the gradients at the root."""
        gathered = self.engine.gather(grads[0], root=self.root)
        return self.zeros(grads[0]) if gathered is None else [sum_arrays(gathered)]


class Gather(RootedNode):
    """See :func:`gather`."""

    function = "gather"

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Collect one array a rank at the root; elsewhere there is an empty one."""
        gathered = self.engine.gather(inputs[0], root=self.root)
        if gathered is not None:
            return tuple(gathered)
        xp = backend.get_array_module(inputs[0])
        return (xp.empty(0, inputs[0].dtype),)

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Return each gradient to where its array came from."""
        return [self.engine.scatter(tuple(grads) if self.is_root else None, self.root)]


class Scatter(RootedNode):
    """See :func:`scatter`."""

    function = "scatter"

    def prepare(self, inputs: Sequence[Any]) -> list[chainer.Variable]:
        """Check this rank's inputs, and at the root how many they are."""
        check_root(self.root, self.engine.size, self.label)
        if self.is_root:
            check_one_per_rank(inputs, self.engine.size, self.label, "variables")
        return super().prepare(inputs)

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Send one array to each rank."""
        if self.is_root:
            return (self.engine.scatter(tuple(inputs), root=self.root),)
        self.ignore(inputs)
        return (self.engine.scatter(None, root=self.root),)

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Collect the gradients at the root."""
        gathered = self.engine.gather(grads[0], root=self.root)
        return self.zeros(grads[0]) if gathered is None else gathered


def allgather(comm: Any, x: Any) -> tuple[chainer.Variable, ...]:
    """Collect one variable of each rank on all ranks. Collective.

    The gradient of ``x`` is the sum of those that all ranks have for it; results that
    no loss depends on count as zeros.

    Args:
        comm: communicator, of this package or of the engine.
        x (chainer.Variable or ndarray): any shape and dtype, which may differ between
            ranks.

    Returns:
        tuple: one variable a rank, also with a single rank.

    Raises:
        TypeError: ``x`` is no array; on all ranks.
        MismatchError: the ranks call different functions, or only some keep a graph
            for the backward pass; on all ranks.
    Cost: forward (size-1) * nbytes sent by each rank, backward the same.
    """
    return AllGather(engine_of(comm, "functions.allgather")).call(lambda: [x])


def alltoall(comm: Any, xs: Sequence[Any]) -> tuple[chainer.Variable, ...]:
    """Send ``xs[i]`` to rank i; return what the ranks sent here. Collective.

    Each gradient goes back to where its variable came from.

    Args:
        comm: communicator, of this package or of the engine.
        xs (sequence of chainer.Variable or ndarray): one for each rank; any shapes
            and dtypes.

    Returns:
        tuple: one variable a rank, also with a single rank.

    Raises:
        ValueError: another number of variables; on all ranks.
        TypeError, MismatchError: as in :func:`allgather`.
    """
    return AllToAll(engine_of(comm, "functions.alltoall")).call(
        lambda: _listed(xs, "alltoall")
    )


def bcast(comm: Any, x: Any, root: int = 0) -> chainer.Variable:
    """Give all ranks the variable of one. Collective.

    The gradient at the root is the sum over all ranks.

    Args:
        comm: communicator, of this package or of the engine.
        x (chainer.Variable or ndarray): at the root, of any shape and dtype. Elsewhere
            ``None``, or a variable, which gets a gradient of zero.
        root: the rank that has it.

    Returns:
        chainer.Variable: it, on all ranks.

    Raises:
        ValueError: no such root; on all ranks.
        TypeError, MismatchError: as in :func:`allgather`.
    """
    node = Bcast(engine_of(comm, "functions.bcast"), root)
    (y,) = node.call(lambda: [x] if node.is_root or x is not None else [])
    return y


def gather(comm: Any, x: Any, root: int = 0) -> Any:
    """Collect one variable of each rank at ``root``. Collective.

    Each rank gets the gradient of its own variable back.

    Args:
        comm: communicator, of this package or of the engine.
        x (chainer.Variable or ndarray): any shape and dtype, which may differ between
            ranks.
        root: the rank that gets them.

    Returns:
        At the root a tuple of one variable a rank, also with a single rank. Elsewhere
        an empty variable, the *delegate*: the backward pass of these ranks must
        start from it, or from a loss that it is connected to.

    Raises:
        ValueError: no such root; on all ranks.
        TypeError, MismatchError: as in :func:`allgather`.
    """
    node = Gather(engine_of(comm, "functions.gather"), root)
    ys = node.call(lambda: [x])
    if node.is_root:
        return ys
    ys[0].name = "delegate_variable"
    return ys[0]


def scatter(comm: Any, xs: Sequence[Any] | None, root: int = 0) -> chainer.Variable:
    """Send ``xs[i]`` of ``root`` to rank i. Collective.

    Args:
        comm: communicator, of this package or of the engine.
        xs (sequence of chainer.Variable or ndarray): at the root one for each rank,
            of any shapes and dtypes. Elsewhere ``None``, or variables, which get a
            gradient of zero.
        root: the rank that has them.

    Returns:
        chainer.Variable: this rank's.

    Raises:
        ValueError: no such root, or another number of variables; on all ranks.
        TypeError, MismatchError: as in :func:`allgather`.
    """
    node = Scatter(engine_of(comm, "functions.scatter"), root)
    (y,) = node.call(
        lambda: _listed(xs, "scatter") if node.is_root or xs is not None else []
    )
    return y


def _listed(xs: Any, function: str) -> Sequence[Any]:
    """Return the rows of one array or variable, or the items of a sequence."""
    if isinstance(xs, (list, tuple)):
        return xs
    has_rows = isinstance(xs, (chainer.Variable, *chainer.get_array_types()))
    if has_rows and xs.ndim > 0:
        return [xs[i] for i in range(xs.shape[0])]
    raise TypeError(
        f"functions.{function}: expected a sequence of variables, one per rank; got "
        f"{type(xs).__qualname__}"
    )
