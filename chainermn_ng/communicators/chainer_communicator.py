"""The communicator that Chainer scripts use."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer

import communicators
from chainermn_ng.communicators import gradients, identity, model_sync, settings
from chainermn_ng.communicators.background import Background
from chainermn_ng.communicators.old_arguments import takes_root_second, takes_x
from chainermn_ng.communicators.parameters import named_parameters

# The same in every MPI that mpi4py knows; MPI need not be started to say it.
_ANY_TAG = -1


class ChainerCommunicator:
    """All ranks' communicator: arrays, objects, and Chainer models.

    It holds an engine communicator, which moves the arrays, and adds what takes a
    model. Copies of it are the same communicator, so links and optimizers that hold
    one can be copied.

    Args:
        engine: made by :func:`communicators.create_communicator`.

    Attributes:
        engine (communicators.CommunicatorBase): it.
        longest_shard (int): samples in the largest shard that
            :func:`~chainermn_ng.scatter_dataset` gave this rank through this
            communicator; 0 before the first.
        has_shard_iterator (bool): whether a
            :class:`~chainermn_ng.iterators.ShardIterator` was made with it.
    """

    def __init__(self, engine: communicators.CommunicatorBase) -> None:
        self.engine = engine
        self.longest_shard = 0
        self.has_shard_iterator = False
        self._models = identity.ModelNumbers()
        self._n_optimizers: Counter[str] = Counter()
        self._n_evaluators = 0
        self._n_iterators = 0
        self._background: Background | None = None

    # -- ranks -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the communicator, e.g. ``"flat"``."""
        return self.engine.name

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.engine.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.engine.size

    @property
    def intra_rank(self) -> int:
        """Number of this process on its host."""
        return self.engine.intra_rank

    @property
    def intra_size(self) -> int:
        """Number of processes on this host."""
        return self.engine.intra_size

    @property
    def inter_rank(self) -> int:
        """Number of this host."""
        return self.engine.inter_rank

    @property
    def inter_size(self) -> int:
        """Number of hosts."""
        return self.engine.inter_size

    @property
    def world_intra_rank(self) -> int:
        """Number of this process among all the job's processes on its host."""
        return self.engine.world_intra_rank

    @property
    def topology(self) -> communicators.Topology:
        """Which ranks share a host."""
        return self.engine.topology

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator below."""
        return self.engine.mpi_comm

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others in a collective, in seconds."""
        return self.engine.timeout_s

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent, by group of ranks."""
        return self.engine.sent_bytes

    def split(self, color: int | None, key: int) -> ChainerCommunicator | None:
        """Make one communicator for each group of ranks with equal ``color``.

        Collective. The new ones inherit the settings of this one.

        Args:
            color: the group; ``None`` or MPI's undefined value for no group.
            key: orders the ranks in the new group; ties in the order of here.

        Returns:
            ChainerCommunicator: this rank's group, or ``None`` if in none.
        """
        engine = self.engine.split(color, key)
        return None if engine is None else ChainerCommunicator(engine)

    def finalize(self) -> None:
        """Release what the communicator holds; it cannot be used afterwards."""
        if self._background is not None:
            self._background.finalize()
        self.engine.finalize()

    def __enter__(self) -> ChainerCommunicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # As the engine does: after an error the ranks may not be at the same point.
        if exc_info[0] is None:
            self.finalize()

    def __copy__(self) -> ChainerCommunicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ChainerCommunicator:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return identity.reference_within_process(self)

    # -- arrays: contracts in communicators.CommunicatorBase -------------------------

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        """Send an array or a tuple of arrays to rank ``dest``."""
        self.engine.send(data, dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Receive what ``source`` sent with :meth:`send`."""
        return self.engine.recv(source, tag)

    @takes_root_second
    @takes_x
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Return the array of ``root`` on all ranks."""
        return self.engine.bcast(data, max_buf_len, root)

    @takes_x
    def gather(self, data: Any, root: int = 0) -> Any:
        """Collect one array a rank on ``root``."""
        return self.engine.gather(data, root)

    def allgather(self, x: Any) -> Any:
        """Collect one array a rank on all ranks."""
        return self.engine.allgather(x)

    def alltoall(self, xs: Any) -> Any:
        """Send ``xs[i]`` to rank i; return what the ranks sent here."""
        return self.engine.alltoall(xs)

    def scatter(self, xs: Any, root: int = 0) -> Any:
        """Send ``xs[i]`` of ``root`` to rank i."""
        return self.engine.scatter(xs, root)

    @takes_x
    def allreduce(self, data: Any, op: str = "sum") -> Any:
        """Reduce an array over all ranks: sum, mean, max, min or prod."""
        return self.engine.allreduce(data, op)

    def reduce_scatter(self, data: Any, op: str = "sum") -> Any:
        """Reduce equal blocks over all ranks and keep this rank's block."""
        return self.engine.reduce_scatter(data, op)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.engine.barrier()

    # -- objects ---------------------------------------------------------------------

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send any picklable object to rank ``dest``."""
        self.engine.send_obj(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int | None = None) -> Any:
        """Receive what ``source`` sent with :meth:`send_obj`.

        Args:
            source: a rank, or MPI's ANY_SOURCE.
            status: an ``mpi4py.MPI.Status`` that gets the sender's rank and tag.
            tag: that of the sender; ``None`` or MPI's ANY_TAG for the next message.

        Returns:
            The object.

        Raises:
            TypeError: the sender could not pickle it.
            CommunicatorError: the sender has left the program.
            CommunicationTimeoutError: nothing came.
        """
        return self.engine.recv_obj(source, _ANY_TAG if tag is None else tag, status)

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Return the object of ``root`` on all ranks."""
        return self.engine.bcast_obj(obj, max_buf_len, root)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect one object a rank on ``root``."""
        return self.engine.gather_obj(obj, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Collect one object a rank on all ranks."""
        return self.engine.allgather_obj(obj)

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        """Send ``objs[i]`` to rank i; return what the ranks sent here."""
        return self.engine.alltoall_obj(objs)

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Send ``objs[i]`` of ``root`` to rank i."""
        return self.engine.scatter_obj(objs, root)

    def allreduce_obj(
        self, obj: Any, op: str | Callable[[Any, Any], Any] = "sum"
    ) -> Any:
        """Reduce any objects over all ranks."""
        return self.engine.allreduce_obj(obj, op)

    # -- models ----------------------------------------------------------------------

    def bcast_data(self, model: chainer.Link, *, root: int = 0) -> None:
        """Give all ranks the parameters and persistent values of one.

        Collective. Parameters that ``root`` has not initialised come from the lowest
        rank that has, and are initialised where they are not.

        Args:
            model: changed in place; dtypes and memory layouts are kept.
            root: whose values all ranks get.

        Raises:
            MismatchError: the parameters differ in path, shape or dtype.
        """
        _check_model(model)
        label = f"bcast_data({self._model_label(model)})"
        model_sync.synchronise_model(self.engine, model, label, root=root)

    def broadcast_data(self, model: chainer.Link) -> None:
        """Do what :meth:`bcast_data` does: the older name."""
        self.bcast_data(model)

    def multi_node_mean_grad(
        self,
        model: chainer.Link,
        zero_fill: bool = False,
        *,
        label: str | None = None,
        loss_scale: float | None = None,
        share: float | None = None,
    ) -> None:
        """Replace each gradient of a model by its average over all ranks.

        Collective. A gradient that is ``None`` on some ranks counts as zero there
        and becomes the average everywhere; one that is ``None`` on all ranks stays
        so. Parameters without a shape must be the same ones on all ranks.

        Args:
            model: its gradients are changed in place; any dtypes and layouts.
            zero_fill: give zeros to initialised parameters for which no rank has a
                gradient.
            label: what the ranks must agree on; by default a number that the model
                gets at its first use here. Use models in the same order on all
                ranks the first time (``bcast_data`` counts), and two models of equal
                shape are not mixed up.
            loss_scale: the factor on the loss, noted beside gradients that this
                rank lacks. Give it if a rank may have no gradient at all.
            share: this rank's part of the total instead of ``1 / size``; the parts
                must add up to 1.

        Raises:
            MismatchError: a rank averages another model, or its parameters differ
                in path, shape or dtype. Raised on all ranks; nothing is changed.
        """
        _check_model(model)
        gradients.mean_gradients(
            self.engine,
            named_parameters(model),
            label or f"multi_node_mean_grad({self._model_label(model)})",
            zero_fill=zero_fill,
            loss_scale=loss_scale,
            share=share,
        )

    def allreduce_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Do what :meth:`multi_node_mean_grad` does: the deprecated name."""
        warnings.warn(
            "allreduce_grad() is deprecated; use multi_node_mean_grad()",
            DeprecationWarning,
            stacklevel=2,
        )
        self.multi_node_mean_grad(model, zero_fill)

    def background(self, label: str) -> Background:
        """Return the thread that communicates beside this communicator.

        Collective at the first call, which makes it.

        Args:
            label: who asks for it; must be equal on all ranks.

        Raises:
            UnavailableError: MPI does not let several threads call it; on all ranks.
        """
        if self._background is None:
            self._background = Background(self.engine, label)
        return self._background

    def new_optimizer_identity(self, copied_from: str = "") -> str:
        """Return what tells an optimizer from others; the same on all ranks.

        Optimizers are numbered from 0 in the order of their creation, the copies of
        each, such as ``"0.0"``, in the order of their first use.
        """
        number = self._n_optimizers[copied_from]
        self._n_optimizers[copied_from] += 1
        return f"{copied_from}.{number}" if copied_from else f"{number}"

    def new_evaluator_number(self) -> int:
        """Return a number for an evaluator; the same on all ranks."""
        self._n_evaluators += 1
        return self._n_evaluators - 1

    def new_iterator_number(self) -> int:
        """Return a number for an iterator; the same on all ranks."""
        self._n_iterators += 1
        return self._n_iterators - 1

    def _model_label(self, model: chainer.Link) -> str:
        return f"{type(model).__name__}, model {self._models.number_of(model)}"

    # -- settings, as ChainerMN has them ---------------------------------------------

    def set_config(self, name: str, value: Any = True) -> None:
        """Change a setting; see :mod:`chainermn_ng.communicators.settings`.

        Raises:
            ValueError: an unknown name; the text lists the known ones.
        """
        settings.set_setting(self, name, value)

    def get_config(self, name: str | None = None) -> Any:
        """Return a setting, or a dictionary of all of them without a name."""
        if name is None:
            return {key: settings.get_setting(self, key) for key in settings.NAMES}
        return settings.get_setting(self, name)

    @contextlib.contextmanager
    def config_scope(self) -> Iterator[None]:
        """Let assignments to attributes change settings of the same name."""
        before = self.within_config_scope
        object.__setattr__(self, "_within_config_scope", True)
        try:
            yield
        finally:
            object.__setattr__(self, "_within_config_scope", before)

    @property
    def within_config_scope(self) -> bool:
        """Whether this runs inside of :meth:`config_scope`."""
        return getattr(self, "_within_config_scope", False)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.within_config_scope:
            self.set_config(name, value)
        else:
            object.__setattr__(self, name, value)


def _check_model(model: object) -> None:
    if not isinstance(model, chainer.Link):
        raise TypeError(f"expected a chainer.Link; got {type(model).__qualname__}")


def _take_over_contracts() -> None:
    """Let the methods that only pass calls on show the engine's documentation."""
    for name, method in vars(ChainerCommunicator).items():
        contract = getattr(communicators.CommunicatorBase, name, None)
        if not name.startswith("_") and callable(method) and contract is not None:
            longer = contract.__doc__ or ""
            if len(longer) > len(method.__doc__ or ""):
                method.__doc__ = longer


_take_over_contracts()
