"""Messages between two ranks that gradients pass back through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainer import backend

import communicators
from chainermn_ng.functions.communication_node import (
    UNREACHED,
    CommunicationNode,
    calls,
    checked_inputs,
    engine_of,
)
from communicators.errors import (
    CommunicationTimeoutError,
    CommunicatorError,
    MismatchError,
)

# Gradients travel beside the messages of the next forward passes, which must not be
# taken for them.
_N_TAGS = 8000


class MessageNode(CommunicationNode):
    """One end of a message.

    Attributes:
        peer (int): rank of the other end.
        tag (int): of the message.
    """

    function = ""
    peer_function = ""

    def __init__(
        self, engine: communicators.CommunicatorBase, peer: int, tag: int
    ) -> None:
        super().__init__(engine)
        self.peer = peer
        self.tag = tag
        self._number = 0

    @property
    def label(self) -> str:
        """Name of the function, the other rank and the tag."""
        toward = "to" if self.function == "send" else "from"
        return f"functions.{self.function} {toward} rank {self.peer} (tag {self.tag})"

    def count(self) -> None:
        """Number the message, as the other end does."""
        kind = (self.function, self.peer, self.tag)
        self._number = calls.next(self.engine, kind)

    def explain(self, error: CommunicatorError) -> CommunicatorError:
        """Return an error that tells what was waited for."""
        is_late = isinstance(error, CommunicationTimeoutError)
        cls = CommunicationTimeoutError if is_late else CommunicatorError
        return cls(
            f"backward pass of {self.label}: {error}. Has the backward pass on rank "
            f"{self.peer} reached functions.{self.peer_function}? {UNREACHED}"
        )


class Send(MessageNode):
    """See :func:`send`."""

    function = "send"
    peer_function = "recv"

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Send the arrays; the output is empty."""
        data = inputs[0] if len(inputs) == 1 else tuple(inputs)
        self.engine.send(data, self.peer, self.tag)
        self.count()
        self._sent = [(x.shape, x.dtype) for x in inputs]
        xp = backend.get_array_module(*inputs)
        return (xp.empty(0, np.float32),)

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Receive the gradients."""
        try:
            message = self.engine.recv(self.peer, self.tag + _N_TAGS)
        except CommunicatorError as error:
            raise self.explain(error) from error
        number, *arrays = message
        if int(number) != self._number:
            raise MismatchError(
                f"backward pass of {self.label}: expected the gradient of message "
                f"{self._number}; got that of message {int(number)}. Backward passes "
                "must run in the same order on both ranks; and a tag that "
                "comm.send or comm.recv uses too needs to be another one"
            )
        got = [(array.shape, array.dtype) for array in arrays]
        if got != self._sent:
            raise MismatchError(
                f"backward pass of {self.label}: sent {self._sent}; got gradients of "
                f"{got}"
            )
        return arrays


class Recv(MessageNode):
    """See :func:`recv`; a delegate is the last output, and may be the only input."""

    function = "recv"
    peer_function = "send"
    is_tuple = False

    def move(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Receive the arrays."""
        data = self.engine.recv(self.peer, self.tag)
        self.count()
        self.is_tuple = isinstance(data, tuple)
        arrays = data if self.is_tuple else (data,)
        self._delegates = [
            (x.shape, x.dtype, backend.get_array_module(x)) for x in inputs
        ]
        xp = backend.get_array_module(*arrays)
        return (*arrays, xp.empty(0, np.float32))

    def move_back(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Send the gradients."""
        message = (np.array(self._number), *grads[:-1])
        try:
            self.engine.send(message, self.peer, self.tag + _N_TAGS)
        except CommunicatorError as error:
            raise self.explain(error) from error
        return [xp.zeros(shape, dtype) for shape, dtype, xp in self._delegates]


def send(x: Any, communicator: Any, rank: int, tag: int = 0) -> chainer.Variable:
    """Send a variable, or several, to one rank, which calls :func:`recv`.

    The backward pass receives the gradients from there. It happens whether or not
    ``x`` needs them, so that the other rank, which cannot know, never waits.

    Args:
        x (chainer.Variable, ndarray, or list or tuple of them): any shapes and
            fixed-size dtypes.
        communicator: of this package or of the engine.
        rank: the receiver.
        tag: 0 to 7999; the same at the receiver.

    Returns:
        chainer.Variable: empty; the *delegate*. The backward pass of this rank must
        start from it, or from a loss that it is connected to by
        :func:`pseudo_connect` or the ``delegate_variable`` of :func:`recv`.

    Raises:
        ValueError: no such rank or tag, the rank itself, or nothing to send.
        TypeError: no array.
        CommunicationTimeoutError: the receiver did not come.
    """
    engine = engine_of(communicator, "functions.send")
    _check_peer(engine, "send", rank, tag)
    inputs = checked_inputs(x if isinstance(x, (list, tuple)) else [x], "send")
    if not inputs:
        raise ValueError("functions.send: nothing to send; got an empty sequence")
    (delegate,) = Send(engine, int(rank), int(tag)).run(inputs)
    delegate.name = "delegate_variable"
    return delegate


def recv(
    communicator: Any,
    rank: int,
    delegate_variable: chainer.Variable | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> Any:
    """Receive what ``rank`` sent by :func:`send`.

    The backward pass sends the gradients there; for variables that no loss depends
    on, zeros.

    Args:
        communicator: of this package or of the engine.
        rank: the sender.
        delegate_variable: a variable of this rank, usually what :func:`send`
            returned, whose backward pass is to run when the result's has.
        tag: that of the sender.
        force_tuple: return a tuple also for a single variable.

    Returns:
        chainer.Variable, or a tuple of them if several were sent: on the device kind
        of the sender's arrays.

    Raises:
        ValueError: no such rank or tag, or the rank itself.
        TypeError: the sender's argument was no array.
        CommunicatorError: the sender has left the program.
        CommunicationTimeoutError: nothing came.
    """
    data, _ = recv_with_delegate(communicator, rank, delegate_variable, tag)
    if force_tuple and not isinstance(data, tuple):
        return (data,)
    return data


def recv_with_delegate(
    communicator: Any,
    rank: int,
    delegate_variable: chainer.Variable | None = None,
    tag: int = 0,
) -> tuple[Any, chainer.Variable]:
    """Receive as :func:`recv` does; return the data, and an empty variable beside it.

    The backward pass of the message runs if it reaches either of them.
    """
    engine = engine_of(communicator, "functions.recv")
    _check_peer(engine, "recv", rank, tag)
    inputs: list[Any] = []
    if delegate_variable is not None:
        inputs = checked_inputs([delegate_variable], "recv")
    node = Recv(engine, int(rank), int(tag))
    *variables, delegate = node.run(inputs)
    return tuple(variables) if node.is_tuple else variables[0], delegate


def _check_peer(
    engine: communicators.CommunicatorBase, function: str, rank: Any, tag: Any
) -> None:
    for what, value in (("rank", rank), ("tag", tag)):
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"functions.{function}: {what} {value!r} is no integer")
    if rank == engine.rank:
        raise ValueError(
            f"functions.{function}: rank {rank} is this rank, which would wait for "
            "itself"
        )
    if not 0 <= rank < engine.size:
        raise ValueError(
            f"functions.{function}: no rank {rank}; expected 0 to {engine.size - 1}"
        )
    if not 0 <= tag < _N_TAGS:
        raise ValueError(
            f"functions.{function}: tag {tag}: expected 0 to {_N_TAGS - 1}"
        )
