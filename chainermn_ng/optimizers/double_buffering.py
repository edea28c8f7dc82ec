"""A multi-node optimizer that communicates while the next gradient is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer
from chainer.serializer import Deserializer

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.gradients import own_gradients
from chainermn_ng.communicators.parameters import named_parameters
from chainermn_ng.optimizers import optimizer_state
from chainermn_ng.optimizers.double_buffering_average import (
    AverageInFlight,
    Averages,
    start_average,
)
from chainermn_ng.optimizers.double_buffering_snapshot import (
    load_averages,
    save_averages,
)
from chainermn_ng.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn_ng.optimizers.overlap import GroupedMean, Parameters
from communicators import CommunicationTimeoutError


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Averages each gradient during the next step's forward and backward pass.

    Made by :func:`create_multi_node_optimizer` with ``double_buffering=True``. What
    differs from :class:`MultiNodeOptimizer`:

    * :meth:`update` number k computes gradient k, begins to average it in the
      background, and applies gradient k-1. The first one applies nothing. After k
      calls gradients 1 to k-1 have been applied, in this order and each once, and
      ``optimizer.t`` is k-1.
    * Hooks, hyperparameters and the dynamic loss scale act when a gradient is applied:
      gradient k-1 with the learning rate of call k, but divided by the loss scale
      that it was computed with. After an update the parameters' ``grad`` is the
      average that was applied; after one that applied nothing it is zero.
    * :meth:`flush` applies the last one. Snapshots hold what is in flight, so a run
      that is resumed goes on as if it had not been interrupted.
    * Copies take what is in flight along, each its own.

    Needs an MPI library with ``MPI_THREAD_MULTIPLE``, and memory for one more set of
    gradients. The average travels on a communicator of its own, so that the main one
    may be used meanwhile.
    """

    _OWN = MultiNodeOptimizer._OWN | {"_in_flight"}

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: ChainerCommunicator,
        zero_fill: bool = True,
        count_samples: Callable[..., int] | None = None,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, count_samples)
        self._in_flight: AverageInFlight | None = None

    @property
    def has_gradient_in_flight(self) -> bool:
        """Whether there is a gradient that has been computed but not been applied."""
        return self._in_flight is not None

    def setup(self, link: chainer.Link) -> DoubleBufferingOptimizer:
        """Set the model to optimize; see :meth:`MultiNodeOptimizer.setup`.

        A gradient in flight belongs to the model before: it is dropped with a
        warning. Call :meth:`flush` before.
        """
        # Dropped: an AverageInFlight that is not kept says so itself.
        self._in_flight = None
        super().setup(link)
        return self

    def flush(self) -> None:
        """Wait for the gradient in flight, if there is one, and apply it. Collective.

        Call it after the last update, and wherever the model must have seen every
        gradient. The next update then begins anew and applies nothing.

        Raises:
            MismatchError: as :meth:`update`; also if only some ranks have a gradient
                in flight. Nothing has been changed then.
        """
        if self._known is None:
            self._synchronise(has_gradients=False)
        waiting = self._in_flight
        what = "flush: nothing is in flight"
        if waiting is not None:
            what = f"flush: apply gradient {self.actual_optimizer.t + 1}"
        parameters = named_parameters(self.target)
        self._agree(what, parameters, self._take_failure(parameters))
        if waiting is not None:
            self._in_flight = None
            self._apply(waiting, parameters)
            self._check_weights(parameters)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the wrapped optimizer and the gradient in flight.

        Saving waits for the gradient and leaves it in flight: it changes nothing and
        is not collective. For loading see :meth:`MultiNodeOptimizer.serialize`; a
        snapshot of an optimizer without double buffering has nothing in flight.
        """
        self._serialize_actual(serializer)
        if isinstance(serializer, Deserializer):
            self._replace_in_flight(load_averages(serializer))
        elif self._in_flight is None:
            save_averages(serializer, None)
        else:
            save_averages(serializer, self._in_flight.averages())
            self._in_flight.keep()

    # -- parts of the base class's methods ---------------------------------------------

    def _is_alone(self) -> bool:
        """Say no: gradients are one step old on one rank, too."""
        return False

    def _backward(
        self,
        parameters: Parameters,
        loss: chainer.Variable | None,
        share: float | None,
        is_counted: bool,
    ) -> None:
        if loss is not None:
            with self._recorded("backward"):
                loss.backward(loss_scale=self.actual_optimizer._loss_scale)
        if not is_counted:
            self.actual_optimizer.target.cleargrads()

    def _step(
        self,
        parameters: Parameters,
        share: float | None,
        mean: GroupedMean | None = None,
    ) -> None:
        comm, actual = self.communicator, self.actual_optimizer
        background = comm.background(self._label("start the background thread"))
        waiting = self._in_flight
        number = actual.t + (1 if waiting is None else 2)
        initialised = [item for item in parameters if item[1].is_initialized]
        grads: list[Any] = []
        error = self._take_failure(parameters)
        try:
            grads = own_gradients(initialised)
        except (RuntimeError, TypeError, ValueError) as failure:
            error = error or failure
        what = f"average gradient {number}, apply "
        what += "none" if waiting is None else f"gradient {number - 1}"
        self._agree(what, parameters, error)
        label = self._label(f"average of gradient {number} in the background")
        self._in_flight = start_average(
            background,
            initialised,
            grads,
            label,
            wire_dtype=comm.engine.allreduce_grad_dtype,
            loss_scale=actual._loss_scale,
            share=share,
            previous=waiting,
            loss_text=self._loss_text(number),
        )
        if waiting is None:
            # As after every update of Chainer's, each parameter has a gradient.
            Averages().put_into(parameters, zero_fill=True)
        else:
            self._apply(waiting, parameters)

    def _apply(
        self,
        average: AverageInFlight,
        parameters: Sequence[tuple[str, chainer.Parameter]],
    ) -> None:
        average.averages().put_into(parameters, self.zero_fill)
        average.keep()
        with self._recorded("update"):
            self.actual_optimizer.update(None)

    def _take_failure(
        self, parameters: Sequence[tuple[str, chainer.Parameter]]
    ) -> BaseException | None:
        """Wait for what is in flight; return why it cannot be applied, or ``None``.

        What has failed is forgotten.
        """
        if self._in_flight is None:
            return None
        with self._recorded("average"):
            error = self._in_flight.failure()
        if error is None:
            return self._in_flight.averages().misfit(parameters)
        self._replace_in_flight(None)
        if isinstance(error, CommunicationTimeoutError):
            # Some rank does not come: there is nobody to agree with.
            raise error
        return error

    def _agree(
        self,
        what: str,
        parameters: Sequence[tuple[str, chainer.Parameter]],
        error: BaseException | None,
    ) -> None:
        """Agree with all ranks on what is done now, before anything is changed.

        Without it a rank with another learning rate, or one that skips a step, would
        be found out by the background thread only when it is too late.
        """
        settings = optimizer_state.describe_hyperparameters(
            self.actual_optimizer, parameters
        )
        label = f"{self._label(what)} [{settings}]"
        try:
            self.communicator.engine.agree(label, error=error)
        except Exception as shared:
            if error is None:
                raise
            raise shared from error

    def _state(self, *, hyperparameters: bool) -> dict[str, Any]:
        state = super()._state(hyperparameters=hyperparameters)
        # One that failed is reported by the next update, on all ranks together.
        waiting = self._in_flight
        if waiting is None or waiting.failure() is not None:
            return {**state, "in_flight": None}
        averages = waiting.averages().on_host()
        in_flight = {"grads": averages.arrays, "loss_scales": averages.loss_scales}
        return {**state, "in_flight": in_flight}

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        sent = state["in_flight"]
        self._replace_in_flight(
            None if sent is None else Averages(sent["grads"], sent["loss_scales"])
        )

    def _replace_in_flight(self, averages: Averages | None) -> None:
        if self._in_flight is not None:
            self._in_flight.keep()
        self._in_flight = (
            None if averages is None else AverageInFlight.arrived(averages)
        )

    def _become_a_copy(self) -> None:
        super()._become_a_copy()
        if self._in_flight is not None:
            averages = self._in_flight.averages().copy()
            self._in_flight = AverageInFlight.arrived(averages)

    def _loss_text(self, number: int) -> str | None:
        if self.communicator.rank != 0:
            return None
        return (
            f"{self._label(f'gradient {number}')} was computed but never applied. Call "
            "flush() of the optimizer after its last update"
        )
