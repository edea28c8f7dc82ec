"""A Chainer optimizer whose steps use the gradients of all ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer.serializer import Deserializer

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.gradients import keep_gradients
from chainermn_ng.communicators.model_sync import (
    settle_lazy_parameters,
    synchronise_model,
)
from chainermn_ng.communicators.parameters import (
    initialised_parameters,
    named_parameters,
    named_parameters_again,
)
from chainermn_ng.optimizers import optimizer_state
from chainermn_ng.optimizers.double_buffering_snapshot import holds_averages
from chainermn_ng.optimizers.gradient_writers import gradient_writers
from chainermn_ng.optimizers.link_attributes import LinkAttributes, meets_other_ranks
from chainermn_ng.optimizers.master_weights import (
    load_master_weights,
    save_master_weights,
)
from chainermn_ng.optimizers.overlap import (
    GroupedMean,
    Options,
    OverlappedMean,
    Parameters,
)
from chainermn_ng.optimizers.overlap_plan import Planner
from chainermn_ng.optimizers.same_weights import check_same_weights
from chainermn_ng.optimizers.samples import (
    share_of_samples,
    warn_if_batch_exceeds_shard,
    warn_if_shards_differ,
)
from chainermn_ng.uncounted import uncounted_batch
from communicators.recording import recorded_span

_MAX_FORWARDS = 3


class MultiNodeOptimizer:
    """Wraps a Chainer optimizer; made by :func:`create_multi_node_optimizer`.

    Attributes that are not its own are read from and set on the wrapped optimizer,
    so it serves wherever that one does. Copies share the communicator.

    Attributes:
        actual_optimizer (chainer.Optimizer): the wrapped one.
        communicator (ChainerCommunicator): whose ranks take part.
        zero_fill (bool): give zeros to parameters for which no rank has a gradient.
    """

    _OWN = frozenset(
        {
            "actual_optimizer",
            "communicator",
            "zero_fill",
            "_count_samples",
            "_identity",
            "_copied_from",
            "_known",
            "_lazy",
            "_batch_is_checked",
            "_planner",
            "_writers",
        }
    )

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: ChainerCommunicator,
        zero_fill: bool = True,
        count_samples: Callable[..., int] | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        self._count_samples = count_samples
        self._planner = planner or Planner()
        self._identity: str | None = communicator.new_optimizer_identity()
        self._copied_from = ""
        # Paths of the parameters when all ranks last had the same model; None: never.
        self._known: tuple[str, ...] | None = None
        # Those of them that no rank had given a shape yet.
        self._lazy: tuple[str, ...] = ()
        self._batch_is_checked = False
        # Used with one rank only. None: not looked up yet.
        self._writers: tuple[Sized, ...] | None = None

    # -- a step ----------------------------------------------------------------------

    def setup(self, link: chainer.Link) -> MultiNodeOptimizer:
        """Set the model to optimize, as Chainer's optimizers do; return this wrapper.

        Not collective. At the next :meth:`update` the model becomes the same on all
        ranks.
        """
        self.actual_optimizer.setup(link)
        self._known = self._writers = None
        self._planner.forget()
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Take one step with the average of all ranks' gradients. Collective.

        With a loss function: make the model the same on all ranks if that has not
        been done, compute the loss and the gradients on this rank's batch, average
        them and let the wrapped optimizer take its step; its hooks see the average.
        Before the first step all ranks get the parameters, persistent values and
        optimizer state of rank 0, and each call is a real step. If the forward pass
        gives parameters their shape and values, and these differ between ranks, they
        are made equal and the forward pass runs once more.

        Without one: the gradients are there already, from one or from several
        backward passes (gradient accumulation: one reduction a step). Call
        ``communicator.bcast_data(model)`` before the first backward pass, else the
        first gradient may belong to weights that differ between ranks.

        Args:
            lossfun: as in Chainer; returns the loss.
            args: positional arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            MismatchError: the ranks are at different steps, in different optimizers,
                or have different hyperparameters or models; raised on all ranks.
                Neither weights nor gradients have been changed then. In debug mode
                also: the weights differ after the step.
        """
        is_checked = self._known is not None and self._batch_is_checked
        if is_checked and self._is_alone():
            self._update_alone(lossfun, args, kwds)
            return
        # Walking through a large model takes time: once before, once after the pass.
        parameters = named_parameters(self.target)
        if self._known is None or self._known != _paths(parameters):
            self._synchronise(has_gradients=lossfun is None)
        if not self._batch_is_checked:
            self._batch_is_checked = True
            warn_if_batch_exceeds_shard(self.communicator, args, kwds)
        share = self._share(args, kwds)
        meets = share is not None and meets_other_ranks(self.target)
        mean = None
        if lossfun is not None:
            parameters, mean = self._compute_gradients(
                parameters, lossfun, args, kwds, share, meets
            )
            if meets:
                share = None
        else:
            if self._lazy and self._settle():
                self._warn_of_first_gradient()
            if meets and abs(share * self.communicator.size - 1) > 1e-6:
                self._warn_of_late_weight()
        self._step(parameters, share, mean)
        self._check_weights(parameters)

    def flush(self) -> None:
        """Do nothing: every gradient has been applied by the update that computed it.

        So that a script may call it whether or not it has asked for double buffering.
        """

    def bcast_state(self, root: int = 0) -> None:
        """Give all ranks the model and the optimizer of one. Collective.

        Sends parameters, persistent values, the optimizer's state, step count and
        hyperparameters. Call it after one rank alone has loaded a snapshot.

        Args:
            root: the rank that has them.
        """
        label = self._label("bcast_state")
        comm = self.communicator
        result = synchronise_model(comm.engine, self.target, label, root=root)
        state = None
        if comm.rank == root:
            state = self._state(hyperparameters=True)
        state = comm.bcast_obj(state, root=root)
        if comm.rank != root:
            self._set_state(state)
        self._known, self._lazy = _paths(named_parameters(self.target)), result.lazy

    def assume_in_step(self) -> None:
        """Take it that all ranks hold the same model and optimizer state already.

        Not collective; called on all ranks after each has loaded its snapshot of one
        iteration. The next :meth:`update` then sends nothing, and persistent values
        stay as they are on each rank.
        """
        parameters = named_parameters(self.target)
        self._known = _paths(parameters)
        self._lazy = tuple(name for name, p in parameters if p.array is None)

    def _is_alone(self) -> bool:
        """Tell whether a step has nothing to do with other ranks.

        A dtype for the wire rounds the gradients of one rank as well, so that it gets
        what several would; in debug mode everything is as it is there.
        """
        engine = self.communicator.engine
        return (
            engine.size == 1
            and engine.allreduce_grad_dtype is None
            and not engine.is_debugging
        )

    def _update_alone(self, lossfun: Any, args: Any, kwds: Any) -> None:
        """Take one step as Chainer's optimizer does; not for the first one.

        On one rank each gradient is its own average, and nobody can differ. The first
        step checks that the communicator can average such gradients.
        """
        actual, engine = self.actual_optimizer, self.communicator.engine
        if not engine.is_usable:
            engine.agree(self._label("mean of the gradients"))
        engine.nccl.raise_if_failed()
        if self._count_samples is not None:
            # Any number is all of them; mistakes in counting are still errors.
            self._share(args, kwds)
        recorder, loss_scale = engine.recorder, actual._loss_scale
        if lossfun is not None:
            with recorded_span(recorder, "forward"):
                loss = lossfun(*args, **kwds)
            self._clear_gradients()
            with recorded_span(recorder, "backward"):
                loss.backward(loss_scale=loss_scale)
            # As Chainer does: the graph's memory is free before the update needs some.
            del loss
        if self._writers is None:
            self._writers = gradient_writers(actual)
        with recorded_span(recorder, "average"):
            # A script's own backward pass may have scaled the loss.
            if lossfun is None or loss_scale is not None or any(self._writers):
                keep_gradients(
                    initialised_parameters(actual.target),
                    zero_fill=self.zero_fill,
                    loss_scale=loss_scale,
                )
        with recorded_span(recorder, "update"):
            actual.update(None)

    def _clear_gradients(self) -> None:
        if getattr(self.actual_optimizer, "_use_cleargrads", True):
            self.actual_optimizer.target.cleargrads()
        else:
            self.actual_optimizer.target.zerograds()

    def _step(
        self,
        parameters: Parameters,
        share: float | None,
        mean: GroupedMean | None = None,
    ) -> None:
        """Average the gradients and apply them.

        Args:
            parameters: of the model.
            share: this rank's part of all samples.
            mean: what :meth:`_backward` has returned; ``None`` without a loss function.
        """
        if mean is None:
            initialised = [item for item in parameters if item[1].is_initialized]
            mean = self._mean([initialised], parameters, share)
        with self._recorded("average"):
            mean.finish()
        with self._recorded("update"):
            self.actual_optimizer.update(None)

    def _backward(
        self,
        parameters: Parameters,
        loss: chainer.Variable | None,
        share: float | None,
        is_counted: bool,
    ) -> GroupedMean | None:
        """Compute the gradients, and begin to average them if they are to overlap.

        Args:
            parameters: of the model, after the forward pass.
            loss: of this rank; ``None`` if it has no samples.
            share: its part of all samples.
            is_counted: whether its gradients have a part in the average.
        """
        initialised = [item for item in parameters if item[1].is_initialized]
        label = self._label("plan how the gradients travel")
        plan = self._planner.plan(self.communicator, initialised, loss, label)
        mean = self._mean(
            plan.of(initialised), parameters, share, in_background=plan.in_background
        )
        if loss is not None:
            with self._recorded("backward"):
                mean.backward(loss, is_counted)
        return mean

    def _mean(
        self,
        groups: Sequence[Parameters],
        parameters: Parameters,
        share: float | None,
        in_background: bool = False,
    ) -> GroupedMean:
        comm, actual = self.communicator, self.actual_optimizer

        def label() -> str:
            settings = optimizer_state.describe_hyperparameters(actual, parameters)
            return f"{self._label('mean of the gradients')} [{settings}]"

        options = Options(self.zero_fill, actual._loss_scale, share)
        if not in_background:
            return GroupedMean(comm.engine, groups, label, options)
        background = comm.background(self._label("start the background thread"))
        return OverlappedMean(comm.engine, groups, label, options, background)

    def _recorded(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose duration a timeline shows, if one records."""
        return recorded_span(self.communicator.engine.recorder, name)

    def _check_weights(self, parameters: Parameters) -> None:
        engine = self.communicator.engine
        if engine.is_debugging:
            label = self._label(f"weights after step {self.actual_optimizer.t}")
            check_same_weights(engine, parameters, label)

    def _state(self, *, hyperparameters: bool) -> dict[str, Any]:
        """Return what the ranks send each other; see :mod:`.optimizer_state`."""
        return optimizer_state.capture(
            self.actual_optimizer, hyperparameters=hyperparameters
        )

    def _set_state(self, state: dict[str, Any]) -> None:
        optimizer_state.apply(self.actual_optimizer, state)

    def _compute_gradients(
        self,
        parameters: Parameters,
        lossfun: Any,
        args: Any,
        kwds: Any,
        share: float | None,
        meets: bool,
    ) -> tuple[Parameters, GroupedMean | None]:
        """Run the loss function and the backward pass.

        Returns:
            The model's parameters after the forward pass, and what :meth:`_backward`
            has returned.
        """
        actual = self.actual_optimizer
        if share == 0 and not self._lazy and not meets:
            # A loss over no samples is NaN or an error; it has no part in the mean.
            actual.target.cleargrads()
            parameters = named_parameters_again(self.target, parameters)
            return parameters, self._backward(parameters, None, share, False)
        # A sample that fills an empty batch is not to be in joint statistics.
        with uncounted_batch(meets and share == 0):
            loss = self._compute_loss(lossfun, args, kwds)
            self._clear_gradients()
            is_counted = share != 0
            if meets:
                # Before the backward pass, in which gradients travel between the ranks.
                loss = loss * (share * self.communicator.size)
                share = None
            parameters = named_parameters_again(self.target, parameters)
            # Without samples they are zero, or the NaN of a loss over none.
            mean = self._backward(parameters, loss, share, is_counted)
            return parameters, mean

    def _compute_loss(self, lossfun: Any, args: Any, kwds: Any) -> Any:
        """Return the loss; all ranks have the parameters that it was computed from.

        The forward pass may give parameters their shape and values.
        """
        for n_left in reversed(range(_MAX_FORWARDS)):
            before = LinkAttributes(self.target) if self._lazy else None
            with self._recorded("forward"):
                loss = lossfun(*args, **kwds)
            if before is None or not self._settle():
                break
            # The values that the loss was computed from are gone on some ranks.
            if n_left == 0:
                self._warn_of_first_gradient()
                break
            loss = None
            before.restore()
        return loss

    def _synchronise(self, has_gradients: bool) -> None:
        comm = self.communicator
        label = self._label("synchronise the model")
        result = synchronise_model(
            comm.engine, self.target, label, compare=has_gradients
        )
        # A rank that alone has loaded a snapshot brings momentum and step count along.
        state = self._state(hyperparameters=False)
        digests, shards = zip(
            *comm.allgather_obj((optimizer_state.digest_of(state), comm.longest_shard)),
            strict=True,
        )
        warn_if_shards_differ(comm, shards)
        if len(set(digests)) > 1:
            state = comm.bcast_obj(state, root=0)
            if comm.rank != 0:
                self._set_state(state)
        self._known, self._lazy = _paths(named_parameters(self.target)), result.lazy
        if result.differed:
            self._warn_of_first_gradient()

    def _settle(self) -> bool:
        """Make newly initialised parameters equal; tell whether they differed."""
        result = settle_lazy_parameters(
            self.communicator.engine,
            self.actual_optimizer.target,
            self._lazy,
            self._label("settle parameters that got their shape"),
        )
        self._lazy = result.lazy
        return result.differed

    def _share(self, args: Any, kwds: Any) -> float | None:
        """Return this rank's part of all samples, if they are to be counted."""
        count = self._count_samples
        if count is None:
            return None
        label = self._label("count the samples")
        return share_of_samples(self.communicator, label, lambda: count(*args, **kwds))

    # -- what the ranks compare, and tell ---------------------------------------------

    def _label(self, what: str) -> str:
        if self._identity is None:
            # A copy counts from its first use: one rank may make copies that it
            # only keeps.
            self._identity = self.communicator.new_optimizer_identity(self._copied_from)
        kind = type(self.actual_optimizer).__name__
        return f"optimizer {self._identity} ({kind}), {what}"

    def _warn_of_first_gradient(self) -> None:
        if self.communicator.rank == 0:
            warnings.warn(
                "the weights differed between ranks when the first gradients were "
                "computed; they are the same now, but this step's gradient is not "
                "that of the common weights. Call communicator.bcast_data(model) "
                "before the first backward pass",
                stacklevel=4,
            )

    def _warn_of_late_weight(self) -> None:
        warnings.warn(
            "the ranks' batches differ in length, and gradients have travelled between "
            "them in the backward pass, where all losses had the same weight. Give "
            "update() the loss function, or multiply the loss by its weight before "
            "backward() and leave count_samples out",
            stacklevel=3,
        )

    # -- standing in for the wrapped optimizer ----------------------------------------

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the wrapped optimizer.

        With the float32 values of ``use_fp32_update``, which Chainer leaves out.

        After loading, the next :meth:`update` makes model and optimizer the same on
        all ranks again, so load on all ranks, or on rank 0 before the first step.
        """
        self._serialize_actual(serializer)
        is_loading = isinstance(serializer, Deserializer)
        if is_loading and holds_averages(serializer) and self.communicator.rank == 0:
            warnings.warn(
                "the snapshot holds a gradient in flight, which this optimizer cannot "
                "apply: it is lost. Call flush() before saving, or resume with "
                "double_buffering=True",
                stacklevel=2,
            )

    def _serialize_actual(self, serializer: chainer.AbstractSerializer) -> None:
        if isinstance(serializer, Deserializer):
            optimizer_state.load(self.actual_optimizer, serializer)
            lost = load_master_weights(self.actual_optimizer, serializer)
            if lost and self.communicator.rank == 0:
                warnings.warn(
                    f"the snapshot lacks the float32 values of {len(lost)} parameters "
                    f"({', '.join(lost[:3])}), which use_fp32_update keeps: they "
                    "go on from the rounded ones of the model",
                    stacklevel=3,
                )
            self._known = None
        else:
            self.actual_optimizer.serialize(serializer)
            save_master_weights(self.actual_optimizer, serializer)

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._OWN or name.startswith("__"):
            # While a copy is being made they are not there yet.
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    def __copy__(self) -> MultiNodeOptimizer:
        return self._with_actual(copy.copy(self.actual_optimizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeOptimizer:
        return self._with_actual(copy.deepcopy(self.actual_optimizer, memo))

    def _with_actual(self, actual: chainer.Optimizer) -> MultiNodeOptimizer:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.actual_optimizer = actual
        twin._become_a_copy()
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._become_a_copy()

    def _become_a_copy(self) -> None:
        self._copied_from = self._identity or self._copied_from
        self._identity = self._writers = None
        # One rank may set up its copy with another model.
        self._planner = copy.copy(self._planner)


def _paths(parameters: Parameters) -> tuple[str, ...]:
    return tuple(name for name, _ in parameters)
