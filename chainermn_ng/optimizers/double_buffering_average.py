"""The average of one step's gradients while it travels, and after."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import chainer

import communicators
from chainermn_ng.communicators.background import Background
from chainermn_ng.communicators.gradients import (
    loss_scale_of_gradients,
    scale_to_share,
)
from chainermn_ng.communicators.parameters import set_gradient, to_host
from chainermn_ng.optimizers.double_buffering_stream import DeviceOrder

Parameters = Sequence[tuple[str, chainer.Parameter]]


@dataclass
class Averages:
    """Averaged gradients by the path of their parameter.

    Attributes:
        arrays: without those that no rank had.
        loss_scales: by what each was multiplied and still has to be divided.
        made_in_background: those of the arrays that this rank had no gradient for.
    """

    arrays: dict[str, Any] = field(default_factory=dict)
    loss_scales: dict[str, float | None] = field(default_factory=dict)
    made_in_background: list[Any] = field(default_factory=list)

    def misfit(self, parameters: Parameters) -> ValueError | None:
        """Return why these cannot be the parameters' gradients, or ``None``."""
        for name, parameter in parameters:
            grad = self.arrays.get(name)
            array = parameter.raw_array
            if grad is None or array is None:
                continue
            if (grad.shape, grad.dtype) != (array.shape, array.dtype):
                return ValueError(
                    f"{name} was {grad.shape} {grad.dtype} when the gradient in flight "
                    f"was computed and is {array.shape} {array.dtype} now; call "
                    "flush() before changing it"
                )
        return None

    def put_into(self, parameters: Parameters, zero_fill: bool) -> None:
        """Make these the parameters' gradients; the arrays are handed over.

        Args:
            parameters: of the model; those without a shape are left out.
            zero_fill: give zeros to those that have no average, else ``None``.
        """
        for name, parameter in parameters:
            if not parameter.is_initialized:
                continue
            grad = self.arrays.get(name)
            if grad is not None:
                set_gradient(parameter, parameter.device.send(grad))
                # Chainer divides by what is noted here, and the backward pass has
                # noted the scale of a later gradient.
                parameter._loss_scale = self.loss_scales[name]
            elif zero_fill:
                set_gradient(parameter, parameter.xp.zeros_like(parameter.raw_array))
            else:
                set_gradient(parameter, None)

    def on_host(self) -> Averages:
        """Return these as NumPy arrays, those that are NumPy arrays as they are."""
        arrays = {name: to_host(array) for name, array in self.arrays.items()}
        return Averages(arrays, self.loss_scales)

    def copy(self) -> Averages:
        """Return these in arrays of their own."""
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        return Averages(arrays, dict(self.loss_scales))


class AverageInFlight:
    """The average of one step's gradients: on its way, or arrived and not yet applied.

    Args:
        future: gives the averages, or the error of the background thread.
        loss_text: what to warn of when this is dropped before :meth:`keep` was called;
            ``None`` for no warning.
        keeps_alive: arrays to hold as long as this.
    """

    def __init__(
        self,
        future: Future[Averages],
        loss_text: str | None = None,
        keeps_alive: Sequence[Any] = (),
    ) -> None:
        self._future = future
        self._keeps_alive = keeps_alive
        # Also called at the end of the program.
        self._warning = (
            None if loss_text is None else weakref.finalize(self, _warn, loss_text)
        )

    @classmethod
    def arrived(cls, averages: Averages) -> AverageInFlight:
        """Return one that needs no more communication."""
        future: Future[Averages] = Future()
        future.set_result(averages)
        return cls(future)

    def failure(self) -> BaseException | None:
        """Wait until it has arrived; return the error if it has failed."""
        return self._future.exception()

    def averages(self) -> Averages:
        """Wait until it has arrived; raise the error if it has failed."""
        return self._future.result()

    def keep(self) -> None:
        """Note that it is not lost: applied, saved, or replaced on purpose."""
        if self._warning is not None:
            self._warning.detach()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self).arrived, (self.averages().copy(),)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=1)


def start_average(
    background: Background,
    parameters: Parameters,
    grads: Sequence[Any],
    label: str,
    *,
    wire_dtype: Any,
    loss_scale: float | None,
    share: float | None,
    previous: AverageInFlight | None,
    loss_text: str | None,
) -> AverageInFlight:
    """Begin to average the gradients of parameters.

    All ranks call it at the same step; nobody waits. The arrays belong to what is in
    flight from now on: give the parameters other gradients at once.

    Args:
        background: does the work.
        parameters: initialised ones with their paths, in an order equal on all ranks.
        grads: theirs, each in memory of its own, or ``None``. They become the average.
        label: says to the ranks' agreement which gradients these are.
        wire_dtype: the communicator's ``allreduce_grad_dtype``.
        loss_scale: as in :func:`mean_gradients`.
        share: this rank's part of the total; ``None`` for equal parts.
        previous: has arrived, and is applied after this has started.
        loss_text: see :class:`AverageInFlight`.
    """
    if share == 0:
        grads = [None] * len(grads)
    if loss_scale is None:
        loss_scale = loss_scale_of_gradients(parameters, grads)
    names = [name for name, _ in parameters]
    loss_scales = {
        name: loss_scale if grad is None else parameter._loss_scale
        for (name, parameter), grad in zip(parameters, grads, strict=True)
    }
    entries = [
        communicators.ArraySpec.of(p.raw_array) if grad is None else grad
        for (_, p), grad in zip(parameters, grads, strict=True)
    ]
    order = DeviceOrder(grads)

    def average() -> Averages:
        with order.on_side_stream():
            if share is not None:
                scale_to_share(grads, share)
            background.engine.allreduce_grad_dtype = wire_dtype
            results = background.engine.allreduce_arrays(
                entries,
                op="mean" if share is None else "sum",
                names=names,
                label=label,
            )
        # A device that was waited for may have been set free by an abort.
        background.engine.nccl.raise_if_failed()
        arrived = Averages()
        for name, grad, result in zip(names, grads, results, strict=True):
            if result is not None:
                arrived.arrays[name] = result
                arrived.loss_scales[name] = loss_scales[name]
                if grad is None:
                    arrived.made_in_background.append(result)
        return arrived

    # CuPy gives memory of the side stream that is freed to the next that asks for it
    # on that stream, although the main stream may not have read it yet. What comes
    # after this one starts behind all that the main stream does to the previous one.
    keeps_alive = previous.averages().made_in_background if previous else ()
    return AverageInFlight(background.submit(average), loss_text, keeps_alive)
