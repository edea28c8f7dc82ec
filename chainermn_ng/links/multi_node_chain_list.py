"""A model whose parts live on several ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn_ng.functions.communication_node import kept_communicator
from chainermn_ng.functions.point_to_point_communication import (
    recv_with_delegate,
    send,
)
from chainermn_ng.functions.pseudo_connect import connect
from chainermn_ng.links.rank_graph import Component, Step, plan, plan_alone


class MultiNodeChainList(chainer.ChainList):
    """This rank's part of a model that is cut over the ranks of a communicator.

    Each link that :meth:`add_link` takes gets its inputs from other ranks, or the
    model's inputs, and sends its output to other ranks, or returns it as the model's
    output. All ranks of the communicator call the model together; a rank whose links
    all send returns an empty *delegate* variable, from which its backward pass
    starts. The backward passes of all links run on every rank that calls
    ``backward`` on what the model returned or on a loss computed from it.

    The first call, or :meth:`check_graph`, is collective: the ranks show each other
    what they have added. If rank 0 sends to rank 1, which does not receive, or if
    links wait for each other in a circle, all ranks raise the same error, which
    shows the graph; nothing has been sent then. The ranks also put all links into
    one common order, so that no two of them wait for each other, whatever the length
    of the messages. Links of one rank always run in the order in which they were
    added.

    Example, for three ranks, of which the last computes the loss::

        class Model(chainermn_ng.MultiNodeChainList):
            def __init__(self, comm):
                super().__init__(comm)
                if comm.rank == 0:
                    self.add_link(Stem(), rank_in=None, rank_out=[1, 2])
                elif comm.rank == 1:
                    self.add_link(Branch(), rank_in=0, rank_out=2)
                else:
                    self.add_link(Head(), rank_in=[0, 1], rank_out=None)

    Copies share the communicator; a checked graph stays checked in them.

    Args:
        comm: communicator, of this package or of the engine. Part of the ranks have
            one of their own (``comm.split``) when each of several groups holds a
            copy of the model.
        check_graph: ``False``: the ranks do not meet at the first call; each
            receives, computes and sends, link by link. For models of which other
            ranks hold their part in another form, such as hand-written calls of
            :func:`chainermn_ng.functions.recv`.
    """

    def __init__(self, comm: Any, *, check_graph: bool = True) -> None:
        super().__init__()
        self._comm = kept_communicator(comm, "MultiNodeChainList")
        self._checks = check_graph
        # Replaced, never changed: shallow copies share them.
        self._components: tuple[Component, ...] = ()
        self._program: list[Step] | None = None

    def add_link(
        self,
        link: chainer.Link,
        rank_in: int | Sequence[int] | None = None,
        rank_out: int | Sequence[int] | None = None,
    ) -> None:
        """Add a link, which runs after those added before.

        Args:
            link: called with one argument for each rank in ``rank_in``: what that
                rank sent, a variable or a tuple of them; or with the model's inputs.
                Returns a variable or a tuple of them.
            rank_in: rank or ranks to receive from; this rank itself for the output
                of an earlier link here; ``None`` for the model's inputs.
            rank_out: rank or ranks to send to; this rank itself for a later link
                here; ``None`` if the output is the model's. One link only has that.

        Raises:
            TypeError: the ranks are no integers.
            ValueError: no such rank, an empty list, or a second model output.
        """
        component = Component(
            type(link).__name__,
            _checked_ranks("rank_in", rank_in, self._comm.size),
            _checked_ranks("rank_out", rank_out, self._comm.size),
        )
        if rank_out is None and any(c.dests is None for c in self._components):
            raise ValueError(
                "MultiNodeChainList.add_link: a second link with rank_out=None; a "
                "model has one output a rank (let one link return a tuple)"
            )
        super().add_link(link)
        self._components = (*self._components, component)
        self._program = None

    def check_graph(self) -> None:
        """Compare the ranks' links, and plan the order of their messages. Collective.

        The first call of the model does it too, if it has not been done since the
        last :meth:`add_link`.

        Raises:
            ValueError: an edge without its other end, or a cycle; on all ranks. The
                text shows the graph. Also if links were added or removed by other
                methods than :meth:`add_link`.
        """
        error = None
        if len(self) != len(self._components):
            error = ValueError(
                f"{len(self)} links, of which {len(self._components)} came by "
                "add_link(link, rank_in, rank_out); use no other method"
            )
        self._comm.engine.agree("graph of a MultiNodeChainList", error=error)
        table = self._comm.allgather_obj(self._components)
        self._program = self._explained(lambda: plan(table)[self._comm.rank])

    def forward(self, *inputs: Any) -> Any:
        """Run this rank's links. All ranks of the communicator call it.

        Args:
            inputs: the model's, for each link with ``rank_in=None``.

        Returns:
            The output of the link with ``rank_out=None``; without one an empty
            variable. Either is connected with all communication of the call.
        """
        if self._program is None:
            if self._checks:
                self.check_graph()
            else:
                self._program = self._explained(
                    lambda: plan_alone(self._components, self._comm.rank)
                )
        run = _Run(self, inputs)
        for step in self._program or ():
            run.do(step)
        return run.result()

    def _explained(self, planning: Any) -> list[Step]:
        try:
            program: list[Step] = planning()
        except ValueError as error:
            raise ValueError(f"MultiNodeChainList: {error}") from None
        return program


class _Run:
    """One forward pass."""

    def __init__(self, model: MultiNodeChainList, inputs: tuple[Any, ...]) -> None:
        self._model = model
        self._inputs = inputs
        self._engine = model._comm.engine
        self._received: dict[tuple[int, int], Any] = {}
        self._outputs: dict[int, Any] = {}
        self._delegates: list[chainer.Variable] = []

    def do(self, step: Step) -> None:
        if step.compute is not None:
            self._compute(step.compute)
            return
        edge, rank = step.edge, self._engine.rank
        assert edge is not None
        where = (edge.dest.index, edge.slot)
        if edge.source.rank == edge.dest.rank:
            self._received[where] = self._outputs[edge.source.index]
        elif edge.source.rank == rank:
            output = self._outputs[edge.source.index]
            self._delegates.append(send(output, self._engine, edge.dest.rank))
        else:
            received, delegate = recv_with_delegate(self._engine, edge.source.rank)
            self._received[where] = received
            self._delegates.append(delegate)

    def _compute(self, index: int) -> None:
        sources = self._model._components[index].sources
        arguments = self._inputs
        if sources is not None:
            arguments = tuple(
                self._received.pop((index, slot)) for slot in range(len(sources))
            )
        self._outputs[index] = self._model[index](*arguments)

    def result(self) -> Any:
        for index, component in enumerate(self._model._components):
            if component.dests is None:
                return self._connected(self._outputs[index], component.name)
        (delegate,) = connect(self._delegates, [self._model.xp.empty(0, np.float32)])
        delegate.name = "delegate_variable"
        return delegate

    def _connected(self, output: Any, name: str) -> Any:
        if not self._delegates:
            return output
        if isinstance(output, (tuple, list)):
            return connect(self._delegates, output)
        if isinstance(output, (chainer.Variable, *chainer.get_array_types())):
            return connect(self._delegates, [output])[0]
        raise TypeError(
            f"MultiNodeChainList: {name} returned {type(output).__qualname__} as the "
            "model's output; expected a variable or a tuple of them"
        )


def _checked_ranks(
    argument: str, ranks: int | Sequence[int] | None, size: int
) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    found = []
    for rank in ranks if isinstance(ranks, (list, tuple)) else [ranks]:
        try:
            found.append(operator.index(rank))
        except TypeError:
            raise TypeError(
                f"MultiNodeChainList.add_link: {argument} {ranks!r}: expected a rank, "
                "a list of ranks, or None"
            ) from None
    if not found or not all(0 <= rank < size for rank in found):
        raise ValueError(
            f"MultiNodeChainList.add_link: {argument} {ranks!r}: expected ranks from 0 "
            f"to {size - 1}, at least one"
        )
    return tuple(found)
