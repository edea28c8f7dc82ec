"""The average of the gradients, in groups, during or after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import chainer
from chainer.backends import cuda

import communicators
from chainermn_ng.backward import backward, hides_parameters
from chainermn_ng.communicators.background import Background
from chainermn_ng.communicators.gradients import mean_gradients, own_gradients
from chainermn_ng.communicators.parameters import gradient_of
from chainermn_ng.optimizers.double_buffering_stream import DeviceOrder
from chainermn_ng.optimizers.gradient_groups import own_gradient
from communicators.devices.host import nccl_takes_host_memory

Parameters = Sequence[tuple[str, chainer.Parameter]]


def go_by_nccl(parameters: Parameters) -> bool:
    """Tell whether the arrays of a model travel by NCCL."""
    if nccl_takes_host_memory():
        return True
    return any(isinstance(p.raw_array, cuda.ndarray) for _, p in parameters)


def is_collective(function: chainer.FunctionNode) -> bool:
    """Tell whether a function's backward pass meets other ranks.

    Such functions have an attribute ``meets_other_ranks`` that is true.
    """
    return getattr(function, "meets_other_ranks", False)


class Options(NamedTuple):
    """How gradients are averaged.

    Attributes:
        zero_fill: as in :func:`mean_gradients`.
        loss_scale: by what the loss is multiplied.
        share: this rank's part of the total.
    """

    zero_fill: bool
    loss_scale: float | None
    share: float | None


class GroupedMean:
    """The average of one step's gradients, after the backward pass.

    Args:
        engine: the communicator's.
        groups: initialised parameters with their paths, in the order in which the
            groups travel.
        label: returns what the ranks' agreement is told; called when it is needed.
        options: how they are averaged.
    """

    def __init__(
        self,
        engine: communicators.CommunicatorBase,
        groups: Sequence[Parameters],
        label: Callable[[], str],
        options: Options,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._label = label
        self._options = options

    def backward(self, loss: chainer.Variable, is_counted: bool = True) -> None:
        """Compute the gradients.

        Args:
            loss: where the backward pass begins.
            is_counted: whether they are this rank's part of the average; if not, the
                pass only serves the other ranks, and leaves no gradient.
        """
        loss.backward(loss_scale=self._options.loss_scale)
        if not is_counted:
            self._clear()

    def finish(self) -> None:
        """Average the gradients. Collective.

        Raises:
            MismatchError: the ranks differ; on all of them. No gradient has been
                changed.
        """
        # One call, so that all groups are in flight; with the bits of a call for each.
        mean_gradients(
            self._engine,
            [item for group in self._groups for item in group],
            self._label(),
            groups=[len(group) for group in self._groups],
            **self._options._asdict(),
        )

    def _clear(self) -> None:
        for group in self._groups:
            for _, parameter in group:
                parameter.cleargrad()


class OverlappedMean(GroupedMean):
    """The average of one step's gradients, during the backward pass.

    A group starts when its last gradient is final and those before it have started.
    Making this is collective: the ranks agree on what they are about to average.
    From then on they are together; whoever fails tells the others.

    Args:
        engine: as in :class:`GroupedMean`, as the next three.
        background: does the work.

    Raises:
        MismatchError: the ranks differ in labels or parameters; on all of them.
    """

    def __init__(
        self,
        engine: communicators.CommunicatorBase,
        groups: Sequence[Parameters],
        label: Callable[[], str],
        options: Options,
        background: Background,
    ) -> None:
        super().__init__(engine, groups, label, options)
        self._background = background
        self._text = label()
        self._futures: list[Future[None]] = []
        self._error: BaseException | None = None
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(groups)
            for _, parameter in group
        }
        self._by_nccl = any(map(go_by_nccl, groups))
        self._n_missing = [len(group) for group in groups]
        self._n_started = 0
        # Gradients that are with the background.
        self._final: dict[int, Any] = {}
        # Here and now: a rank that is elsewhere is found where the others look for it,
        # and before anything is averaged.
        engine.agree(self._text, describe(groups))

    def backward(self, loss: chainer.Variable, is_counted: bool = True) -> None:
        """Compute the gradients, and start groups meanwhile.

        Raises:
            Exception: what the backward pass raises; the other ranks are told of it,
                and their :meth:`finish` raises then. No gradient is left.
        """
        try:
            backward(
                loss,
                self._note_final if is_counted else _forget,
                loss_scale=self._options.loss_scale,
                holds=self._holds_back,
            )
        except BaseException as error:
            self._abandon(error)
            raise
        if not is_counted:
            self._clear()

    def finish(self) -> None:
        """Start the groups that have not been, and wait for all. Collective.

        Raises:
            RankFailedError, ...: another rank has failed since; no gradient is left.
        """
        error = self._changed() or _own_all(
            [
                item
                for group in self._groups
                for item in group
                if id(item[1]) not in self._final
            ]
        )
        if error is not None:
            self._abandon(error)
            raise error
        while self._n_started < len(self._groups):
            self._start_next()
        self._wait()
        if self._error is not None:
            self._clear()
            raise self._error

    def _holds_back(self, function: chainer.FunctionNode) -> bool:
        """Tell whether no group may start while a function is still to come.

        Two NCCL communicators of one process must be used in the same order on all
        ranks, which nobody can promise of two threads.
        """
        if hides_parameters(function):
            return True
        return self._by_nccl and is_collective(function)

    def _note_final(self, parameter: chainer.Parameter) -> None:
        number = self._group_of.get(id(parameter))
        if number is None:
            return
        self._final[id(parameter)] = own_gradient(parameter)
        self._n_missing[number] -= 1
        # The last one waits for finish: there is always one left to report errors in.
        last = len(self._groups) - 1
        while self._n_started < last and self._n_missing[self._n_started] == 0:
            self._start_next()

    def _start_next(self) -> None:
        number, background = self._n_started, self._background
        group, options = self._groups[number], self._options._asdict()
        label = part_label(self._text, number, len(self._groups))
        # The arrays say on which device; some ranks may lack all the gradients.
        order = DeviceOrder([parameter.raw_array for _, parameter in group])
        wire_dtype = self._engine.allreduce_grad_dtype

        def average() -> None:
            background.engine.allreduce_grad_dtype = wire_dtype
            with order.on_side_stream():
                mean_gradients(background.engine, group, label, **options)
            # A device that was waited for may have been set free by an abort.
            background.engine.nccl.raise_if_failed()

        self._n_started += 1
        self._submit(average)

    def _submit(self, work: Callable[[], None]) -> None:
        def run() -> None:
            # The first error is one of all ranks; all leave out what would follow.
            if self._error is None:
                try:
                    work()
                except BaseException as error:
                    self._error = error

        self._futures.append(self._background.submit(run))

    def _abandon(self, error: BaseException) -> None:
        """Tell the other ranks, where they wait for the next group, of an error."""
        engine = self._background.engine
        label = f"{self._text}, backward pass"
        self._submit(lambda: engine.agree(label, error=error))
        is_lost = isinstance(error, communicators.CommunicationTimeoutError)
        if isinstance(error, Exception) and not is_lost:
            self._wait()
            self._clear()

    def _wait(self) -> None:
        for future in self._futures:
            future.result()

    def _changed(self) -> RuntimeError | None:
        """Return an error if a gradient is another one than was handed over."""
        for group in self._groups:
            for name, parameter in group:
                grad = self._final.get(id(parameter))
                if grad is not None and gradient_of(parameter) is not grad:
                    return RuntimeError(
                        f"{self._text}: the gradient of {name} was changed in the "
                        "backward pass after it had become final, as the graph shows; "
                        "a function runs a backward pass of its own, perhaps. Set its "
                        "attribute hides_parameters to True, or use overlap=False"
                    )
        return None


def part_label(label: str, number: int, n_groups: int) -> str:
    """Return what the agreement on one group is told."""
    return f"{label}, group {number + 1} of {n_groups}"


def describe(groups: Sequence[Parameters]) -> list[tuple[str, str]]:
    """Return path and kind of each parameter, as an agreement compares them."""
    return [
        (name, str(communicators.ArraySpec.of(parameter.raw_array)))
        for group in groups
        for name, parameter in group
    ]


def _own_all(parameters: Parameters) -> Exception | None:
    try:
        own_gradients(parameters)
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return None


def _forget(_parameter: chainer.Parameter) -> None:
    """Be told that a gradient is final which nobody wants."""
