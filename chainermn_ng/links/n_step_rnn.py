"""Recurrent networks that are cut over ranks in the direction of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
from chainer.links.rnn.n_step_rnn import NStepRNNBase

from chainermn_ng.functions.communication_node import kept_communicator
from chainermn_ng.functions.point_to_point_communication import recv, send


class MultiNodeNStepRNN(chainer.Chain):
    """A recurrent network that gets and gives its hidden states from and to ranks.

    Made by :func:`create_multi_node_n_step_rnn`.

    Attributes:
        actual_rnn (chainer.links.rnn.n_step_rnn.NStepRNNBase): the wrapped link.
        communicator: whose ranks these are.
        rank_in (int): sends the initial states, or ``None``.
        rank_out (int): receives the final states, or ``None``.
        n_cells (int): number of the states: 2 for LSTM, else 1.
    """

    def __init__(
        self,
        link: NStepRNNBase,
        communicator: Any,
        rank_in: int | None,
        rank_out: int | None,
    ) -> None:
        if not isinstance(link, NStepRNNBase):
            raise ValueError(
                "create_multi_node_n_step_rnn: expected one of Chainer's NStep links; "
                f"got {type(link).__qualname__}"
            )
        super().__init__()
        with self.init_scope():
            self.actual_rnn = link
        self.communicator = kept_communicator(
            communicator, "create_multi_node_n_step_rnn"
        )
        self.rank_in = rank_in
        self.rank_out = rank_out
        self.n_cells = link.n_cells

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Receive the states, run the network, send the states.

        Args:
            inputs: those of the wrapped link but the initial states: the list of
                sequences.

        Returns:
            What the wrapped link returns (final states, list of sequences), and a
            delegate variable, which is ``None`` without ``rank_out``. The backward
            pass must reach it: start from it, or from a loss that
            :func:`~chainermn_ng.functions.pseudo_connect` connects with it.
        """
        cells: Sequence[Any] = [None] * self.n_cells
        if self.rank_in is not None:
            cells = recv(self.communicator, self.rank_in, force_tuple=True)
        outputs = self.actual_rnn(*cells, *inputs)
        if self.rank_out is None:
            return (*outputs, None)
        # One message: the gradients of two could come back in either order.
        delegate = send(outputs[: self.n_cells], self.communicator, self.rank_out)
        return (*outputs, delegate)


def create_multi_node_n_step_rnn(
    actual_link: NStepRNNBase,
    communicator: Any,
    rank_in: int | None = None,
    rank_out: int | None = None,
) -> MultiNodeNStepRNN:
    """Cut a recurrent network over ranks: each runs it on its part of the sequences.

    The link that is returned takes the sequences alone; the initial states come from
    ``rank_in``, and the final ones go to ``rank_out``.

    Args:
        actual_link: ``NStepLSTM``, ``NStepGRU``, ``NStepRNNTanh`` or
            ``NStepRNNReLU`` of Chainer, or their ``NStepBi...`` forms.
        communicator: of this package or of the engine.
        rank_in: the rank whose final states these sequences start from; ``None`` to
            start from zeros.
        rank_out: the rank that goes on; ``None`` for the last.

    Returns:
        MultiNodeNStepRNN: see there for what it returns.

    Raises:
        ValueError: the link is none of these.
    """
    return MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)
