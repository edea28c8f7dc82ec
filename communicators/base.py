"""The contract of a communicator, and what all communicators share."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import numpy as np

from communicators import leaving, nccl_bindings
from communicators.agreement import FINALIZE, Agreement, Details
from communicators.array_collectives import ArrayCollectives
from communicators.array_reductions import ArrayReductions
from communicators.bucket_flow import MAX_IN_FLIGHT
from communicators.buckets import DEFAULT_BUCKET_BYTES, ArraySpec
from communicators.debugging import is_debug_asked_for
from communicators.devices.choose import DeviceChoice
from communicators.devices.device import FlatBuffer
from communicators.devices.host import nccl_takes_host_memory
from communicators.dtypes import Array, parse_wire_dtype
from communicators.errors import (
    CommunicatorError,
    TopologyError,
    UnavailableError,
)
from communicators.host_allocation import allocate_on_host
from communicators.limits import DEFAULT_TIMEOUT_S, check_timeout
from communicators.local_rank import local_rank, remember_local_rank
from communicators.many_arrays import ManyArrays
from communicators.nccl_side import GroupEntry, NcclSide
from communicators.object_collectives import ObjectCollectives, ObjectOp
from communicators.topology import (
    TOPOLOGY_VARIABLE,
    Topology,
    pretended_from_environment,
)
from communicators.transports import cross_memory, load

if TYPE_CHECKING:
    from communicators.devices.device import Device
    from communicators.recording import Recorder
    from communicators.transports.group import Group
    from communicators.transports.mpi import MpiTransport
    from communicators.transports.progress import Handle, Steps
    from communicators.transports.same_host import SameHostTransport


_P = ParamSpec("_P")
_R = TypeVar("_R")


def collective(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let one thread at a time into the collectives of a communicator.

    Ranks pair their calls by order, and two threads have none: the calls of one would
    be paired with those of the other.
    """

    @functools.wraps(method)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        comm: Any = args[0]
        if not comm._lock.acquire(blocking=False):
            raise CommunicatorError(
                f"{method.__name__}: another thread is in a collective of this "
                "communicator; give each thread one of its own, made by split"
            )
        try:
            return method(*args, **kwargs)
        finally:
            comm._lock.release()

    return alone


class CommunicatorBase:
    """A named way to reduce and move arrays over all ranks.

    A communicator of one's own derives from this class and defines
    :meth:`all_reduce_flat` (or :meth:`start_all_reduce_flat`); everything else is
    built on it. All methods but the properties, ``send`` and ``recv`` are
    *collective*: all ranks call them, in the same order. Each begins with an
    agreement of the ranks, so a rank that calls something else, passes other shapes
    or dtypes, leaves the program or stays away gives an error on every rank:

    * :class:`~communicators.errors.MismatchError`: another operation, other arrays;
    * ``TypeError`` or ``ValueError``: bad arguments on some rank;
    * :class:`~communicators.errors.CommunicationTimeoutError`: a rank did not come;
    * :class:`~communicators.errors.RankFailedError`: a rank has failed in the middle;
      the text says how, and the rank itself raises what it was.

    After the first two the ranks are in step again and may go on; after the others the
    communicator is unusable.

    Arrays are NumPy's, or CuPy's on one GPU a rank (and others' that have
    ``__cuda_array_interface__``), not both in one call; results are of the same kind.
    On GPUs the work is enqueued: results are ready on CuPy's current stream, not on
    the host, and inputs must be ready there.

    Args:
        mpi_comm: mpi4py communicator of the ranks; ``None`` for MPI's world.
        topology: pretended topology (see :meth:`Topology.parse`), or ``None``: what
            ``CHAINERMN_NG_TOPOLOGY`` says, else MPI's shared-memory split.
        allreduce_grad_dtype: dtype of real floating arrays on the wire in
            :meth:`allreduce_arrays`; ``None`` keeps each array's own, and float32
            for half precision.
        bucket_bytes: upper bound of the flat buffers in :meth:`allreduce_arrays`.
        timeout_s: how long a rank waits for the others, in seconds; ``None``: for
            ever. NCCL operations too: one that takes longer ends the job.
        nccl_binding: how NCCL is called for GPU arrays: ``"cupy"`` or ``"pynccl"``;
            ``None``: what ``CHAINERMN_NG_NCCL_BINDING`` says, else ``"cupy"``.
            Loaded at the first use of GPU arrays, and here if it is given.

    Raises:
        TopologyError: the topology does not fit; on all ranks.
        ValueError: an option is out of range.
        UnavailableError: see :meth:`missing`.

    Attributes:
        name: the name in the registry.
        device_types: the kinds of arrays that :meth:`allreduce_arrays` takes:
            ``"cpu"`` (NumPy), ``"gpu"`` (CuPy, and what has
            ``__cuda_array_interface__``). Single NumPy arrays, such as metrics, are
            reduced by all.
        nccl_spans_hosts: whether there is NCCL over all ranks. If not, only groups
            have it, and other collectives on GPU arrays go through host memory.
        devices: where its arrays may be.
        nccl: what it does with NCCL.
        nccl_binding: the name of the binding.
        is_debugging: whether the ranks compare more than they need to (see
            :mod:`communicators.debugging`); ``CHAINERMN_NG_DEBUG`` says it.
        real_host: number of the machine that this rank runs on, never pretended;
            counts the hosts of this communicator.
        is_pretended: whether the topology is another one than the machines'.
        why_mpi_in_host: why ranks of one host reach each other by MPI and not
            directly (see :mod:`communicators.transports.cross_memory`); ``None`` if
            they do, or if nothing has been reduced yet.
    """

    name: str = ""
    device_types: tuple[str, ...] = ("cpu",)
    nccl_spans_hosts: bool = True
    #: Whether host arrays are reduced by :meth:`world_ring`; if not, it is made when
    #: something else needs it.
    reduces_by_world_ring: bool = True

    def __init__(
        self,
        mpi_comm: Any = None,
        *,
        topology: Topology | str | Sequence[str] | None = None,
        allreduce_grad_dtype: Any = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        nccl_binding: str | None = None,
    ) -> None:
        missing = self.missing()
        if missing:
            raise UnavailableError(f"{type(self).__qualname__}: {missing}")
        # A lone raise would leave the other ranks waiting: the ranks agree first.
        error = _settings_error(
            bucket_bytes, timeout_s, allreduce_grad_dtype, nccl_binding
        )
        if error is not None:
            bucket_bytes, allreduce_grad_dtype = 0, None
            timeout_s = DEFAULT_TIMEOUT_S
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.allreduce_grad_dtype = parse_wire_dtype(allreduce_grad_dtype)
        # One that is only the default need not be there until it is used.
        self._given_binding = nccl_binding
        self.nccl_binding = nccl_bindings.BINDINGS[0]
        if error is None:
            self.nccl_binding = nccl_binding or nccl_bindings.default_name()
        self.is_debugging = error is None and is_debug_asked_for()
        messages = load("messages")
        self.mpi_comm = messages.world() if mpi_comm is None else mpi_comm
        self._lock = threading.RLock()
        self._messenger = messages.Messenger(self.mpi_comm, timeout_s)
        self._agreement = Agreement(self._messenger, self.is_debugging)
        leaving.enter(self._agreement)
        by_nccl = error is None and nccl_takes_host_memory()
        # Before anything that MPI does without a time limit.
        self.agree(
            f"create_communicator {self.name or type(self).__qualname__}",
            f"allreduce_grad_dtype={self.allreduce_grad_dtype}, "
            f"bucket_bytes={self.bucket_bytes}, nccl_binding={self.nccl_binding}"
            f"{', NumPy arrays by NCCL' if by_nccl else ''}"
            f"{', debug mode' if self.is_debugging else ''}",
            error=error,
        )
        self._progress = load("progress").Progress(
            timeout_s,
            self._messenger.raise_if_asked,
            self._messenger.raise_stopped,
            self._get_out_of_step,
        )
        self._arrays = ArrayCollectives(self, self._messenger, self._agreement)
        self._objects = ObjectCollectives(self._messenger, self._agreement)
        self._reductions = ArrayReductions(self, self._agreement)
        self._many = ManyArrays(self, self._agreement)
        self.devices = DeviceChoice(self.device_types, self.bucket_bytes, MAX_IN_FLIGHT)
        self._groups: list[Group] = []
        self._mpi_transports: list[MpiTransport] = []
        self._held: list[CommunicatorBase] = []
        self._apart: list[CommunicatorBase] = []
        self._sent_before: Counter[str] = Counter()
        self._n_started = 0
        self._world_ring: Group | None = None
        self.why_mpi_in_host: str | None = None
        self._recorder: Recorder | None = None
        real = Topology.from_names(messages.shared_memory_hosts(self.mpi_comm))
        self.real_host = real.inter_rank(self.rank)
        self.nccl = NcclSide(
            self.name or type(self).__qualname__,
            self.nccl_binding,
            self._messenger,
            self._agreement,
            self.give_up_in_flight,
            self.real_host,
            spans_hosts=self.nccl_spans_hosts,
        )
        remember_local_rank(
            real, messages.world_ranks(self.mpi_comm), self.rank, messages.world()
        )
        spans_job = self.size == messages.world().Get_size()
        self._topology = self._agree_on_topology(topology, real, spans_job)
        self.is_pretended = self._topology != real

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = CommunicatorBase
        if (
            cls.all_reduce_flat is base.all_reduce_flat
            and cls.start_all_reduce_flat is base.start_all_reduce_flat
        ):
            raise TypeError(
                f"{cls.__qualname__} defines neither all_reduce_flat nor "
                "start_all_reduce_flat"
            )
        own = vars(cls)
        if {"all_reduce_flat", "start_all_reduce_flat"} & own.keys():
            # One that reduces in another way than its parent must be asked to.
            setattr(  # noqa: B010 - mypy takes no assignment to a method
                cls,
                "in_place_group",
                own.get("in_place_group", base.in_place_group),
            )

    def _agree_on_topology(
        self,
        wanted: Topology | str | Sequence[str] | None,
        real: Topology,
        spans_job: bool,
    ) -> Topology:
        topology, source = real, ""
        error: Exception | None = None
        if wanted is None and spans_job:
            wanted = pretended_from_environment()
            source = f"{TOPOLOGY_VARIABLE}: "
        if wanted is not None:
            try:
                topology = Topology.coerce(wanted, self.size)
            except TopologyError as failure:
                error = TopologyError(f"{source}{failure}")
            except TypeError as failure:
                error = failure
        self.agree("create_communicator", f"topology {topology}", error=error)
        return topology

    @classmethod
    def missing(cls) -> str | None:
        """Return what this machine lacks for this communicator, or ``None``.

        Asked before anything else is done; a class of one's own extends it.
        """
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is missing; pip install 'chainermn-ng[mpich]' brings it"
        return None

    # -- ranks ---

    @property
    def rank(self) -> int:
        """This process's number, ``0..size-1``."""
        return self._messenger.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._messenger.size

    @property
    def topology(self) -> Topology:
        """Which ranks share a host."""
        return self._topology

    @property
    def intra_rank(self) -> int:
        """Position among this communicator's ranks on this host."""
        return self._topology.intra_rank(self.rank)

    @property
    def intra_size(self) -> int:
        """Number of this communicator's ranks on this host."""
        return self._topology.intra_size(self.rank)

    @property
    def inter_rank(self) -> int:
        """Number of this host among the communicator's hosts."""
        return self._topology.inter_rank(self.rank)

    @property
    def inter_size(self) -> int:
        """Number of hosts."""
        return self._topology.n_hosts

    @property
    def world_intra_rank(self) -> int:
        """Position among all of the job's processes on this real host.

        The number to choose a device by: unlike ``intra_rank`` it is unique on the
        machine also in a communicator that ``split`` made, and never pretended.

        Raises:
            CommunicatorError: the communicator does not span the job, and neither a
                wider one nor the launcher has told.
        """
        return local_rank()

    @property
    def options(self) -> dict[str, Any]:
        """The settings with which ``split`` makes a communicator of the same kind."""
        return {
            "topology": self._topology,
            "allreduce_grad_dtype": self.allreduce_grad_dtype,
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
            "nccl_binding": self._given_binding,
        }

    def options_for(self, members: Sequence[int]) -> dict[str, Any]:
        """Return the settings with which ``split`` makes one for some of the ranks.

        Args:
            members: ranks of this communicator, in the order of the new one.
        """
        return {**self.options, "topology": self._topology.restrict(members)}

    @property
    def thread_level(self) -> str:
        """What MPI lets threads do; with ``"multiple"`` each may have a communicator.

        The others are MPI's ``"single"``, ``"funneled"`` and ``"serialized"``.
        """
        level: str = load("messages").thread_level()
        return level

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes of payload that this rank has sent, by group of ranks.

        ``"messages"`` counts arrays and objects moved outside of reductions; the
        other keys are the groups of the reductions, such as ``"intra"``.
        """
        counts = {"messages": self._messenger.sent_bytes}
        for label, sent in self._sent_before.items():
            counts[label] = counts.get(label, 0) + sent
        world = self.nccl.world
        if self._world_ring is None and world is not None and world.sent_bytes:
            counts["world"] = world.sent_bytes
        for transport in self._transports():
            before = counts.get(transport.label, 0)
            counts[transport.label] = before + transport.sent_bytes
        for held in self._held:
            for label, sent in held.sent_bytes.items():
                counts[label] = counts.get(label, 0) + sent
        return counts

    @property
    def recorder(self) -> Recorder | None:
        """What is told how long the parts of operations take; see its class."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        for held in self._held:
            held.recorder = recorder

    # -- for those who implement one ---

    def in_place_group(self) -> Group | None:
        """Return all ranks as one group, if nothing but the sum matters in it.

        Then ``allreduce_arrays`` needs no buckets where the ranks reach each other's
        memory. Collective, as :meth:`world_ring`; ``None``: :meth:`all_reduce_flat` is
        what reduces, always.
        """
        return None

    @property
    def buffer_parts(self) -> int:
        """Into how many equal parts device buffers are to be divisible."""
        return 1

    def all_reduce_flat(self, buffer: FlatBuffer, op: str) -> None:
        """Reduce one flat buffer over all ranks, in place.

        Called by ``allreduce`` and ``allreduce_arrays`` after the ranks have agreed.
        All ranks must end with bit-identical buffers.

        Args:
            buffer: one-dimensional, C-contiguous, of the same length (at least 1)
                and dtype on all ranks. A NumPy array; with ``"gpu"`` in
                :attr:`device_types` also a
                :class:`~communicators.devices.buffer.DeviceBuffer`, whose length is a
                multiple of :attr:`buffer_parts`.
            op: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``.
        """
        self.start_all_reduce_flat(buffer, op).wait()

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        """Begin :meth:`all_reduce_flat`; ``wait()`` of the result completes it.

        Several may be in flight, begun in the same order on all ranks. A device
        buffer is complete when its fence says so: ``wait()`` does not block then.
        """
        self.all_reduce_flat(buffer, op)
        finished: Handle = load("progress").Finished()
        return finished

    def create_group(
        self,
        label: str,
        color: int | None,
        key: int,
        lane: int = 0,
        *,
        is_world: bool = False,
    ) -> Group | None:
        """Make the transports among the ranks of equal colour. Collective.

        Args:
            label: name in :attr:`sent_bytes`.
            color: ranks of one colour form a group; ``None`` for no group.
            key: order within the group.
            lane: NCCL operations of groups with lane 1 may run beside those of lane 0.
            is_world: all ranks in their order; NCCL needs no further communicator.
        """
        part = load("messages").split_mpi(self.mpi_comm, color, key)
        group: Group | None = None
        if part is not None:
            group = load("group").Group(
                load("mpi").MpiTransport(part, label), self._same_host(part, label)
            )
            self._groups.append(group)
        self.nccl.add_group(GroupEntry(group, label, color, key, lane, is_world))
        return group

    def _same_host(self, part: Any, label: str) -> SameHostTransport | None:
        """Connect a group's ranks directly if they share a host, pretended or not."""
        mine = (self.real_host, self._topology.inter_rank(self.rank))
        if len(set(part.allgather(mine))) > 1 or part.Get_size() == 1:
            return None
        try:
            transport: SameHostTransport = load("same_host").connect(part, label)
        except UnavailableError as reason:
            self.why_mpi_in_host = str(reason)
            return None
        return transport

    def create_mpi_transport(
        self, label: str, color: int | None, key: int
    ) -> MpiTransport | None:
        """Make a transport for host memory only. Otherwise as :meth:`create_group`."""
        part = load("messages").split_mpi(self.mpi_comm, color, key)
        if part is None:
            return None
        transport: MpiTransport = load("mpi").MpiTransport(part, label)
        self._mpi_transports.append(transport)
        return transport

    def hold(
        self,
        inner: CommunicatorBase,
        *,
        on_devices: bool = True,
        is_apart: bool = False,
    ) -> CommunicatorBase:
        """Take over another communicator of the same ranks that does the reducing.

        Its bytes count as this one's, and it is finalized with this one.

        Args:
            inner: made with ``self.mpi_comm``.
            on_devices: it reduces device buffers too.
            is_apart: it works by itself, for a thread of its own: an error here does
                not concern it.
        """
        self._held.append(inner)
        if is_apart:
            self._apart.append(inner)
        else:
            inner._messenger.leader = self._messenger
        inner.recorder = self._recorder
        if on_devices:
            self.nccl.lead(inner.nccl)
        return inner

    def release(self, inner: CommunicatorBase) -> None:
        """Give up what :meth:`hold` has taken over, and finalize it. Collective."""
        self._held.remove(inner)
        self._sent_before.update(inner.sent_bytes)
        inner.finalize()

    def reducer_for(
        self, nbytes: int, measure: Callable[[CommunicatorBase], float]
    ) -> CommunicatorBase:
        """Return who reduces the buckets of many arrays: by default this one.

        Called by ``allreduce_arrays`` after the ranks have agreed. Collective.

        Args:
            nbytes: of all arrays; the same on all ranks.
            measure: reduces the same arrays once by a communicator of the same ranks,
                into memory of its own, and returns the seconds that it took.
        """
        return self

    def prepare(self, device: Device, *, by_ring: bool = False) -> Device:
        """Make what takes all ranks to make for arrays on a device; return the device.

        Collective, and called when the ranks have just agreed on what to do with the
        arrays: they wait for each other without a limit here, so nothing that can fail
        on one rank alone may come between.

        Args:
            device: of the arrays.
            by_ring: :meth:`world_ring` is needed for host arrays, whatever the
                communicator.

        Raises:
            UnavailableError, CommunicatorError, ...: as :meth:`NcclSide.open`.
        """
        describe = self._messenger.describe
        self.nccl.open(device)
        if device.uses_nccl:
            # By host memory go dtypes that NCCL lacks.
            by_ring = self.nccl.world is None
        if by_ring or self.reduces_by_world_ring:
            self.world_ring()
        # Not what was made, but what it was made for.
        self._messenger.describe = describe
        return device

    def world_ring(self) -> Group:
        """Return the transports over all ranks, made at the first call. Collective."""
        if self._world_ring is None:
            self._world_ring = self.create_group("world", 0, self.rank, is_world=True)
        assert self._world_ring is not None
        return self._world_ring

    def next_tag(self) -> int:
        """Return a tag for one operation on transports. Same order on all ranks."""
        self._n_started += 1
        return self._n_started

    def start_steps(self, steps: Steps) -> Handle:
        """Begin an operation of transports, to be advanced with all others."""
        return self._progress.start(steps, f"{self.name}: reduction in flight")

    def give_up_in_flight(self, error: BaseException) -> None:
        """Note an error in the middle of a reduction: the ranks are out of step.

        The communicator is unusable afterwards, and the other ranks are told why.
        """
        self._progress.give_up(error)
        for inner in self._held:
            if inner not in self._apart:
                inner.give_up_in_flight(error)

    def _get_out_of_step(self, error: BaseException) -> None:
        # One rank alone is always in step.
        if self.size > 1:
            self._messenger.give_up(error)

    @collective
    def agree(
        self, label: str, details: Details = "", error: BaseException | None = None
    ) -> None:
        """Meet all ranks at one point of the program, as every collective does.

        Args:
            label: the operation; must be equal on all ranks.
            details: what else must be equal.
            error: why this rank cannot go on; raised on all ranks.

        Raises:
            MismatchError: label or details differ.
            TypeError, ValueError, OSError, CommunicatorError: some rank gave an
                error; other classes arrive as ``RankFailedError``.
        """
        self._agreement.check(label, details, error=error)

    @property
    def is_usable(self) -> bool:
        """Whether it is neither finalized, nor was a collective of it given up."""
        return not (self._messenger.is_finalized or self._messenger.is_broken)

    @property
    def n_collectives(self) -> int:
        """Number of collectives begun so far, agreements among them."""
        return self._agreement.sequence

    # -- array collectives ---

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        """Send an array, or a tuple of arrays, to one rank.

        Args:
            data: arrays of any shape, layout and fixed-size dtype. GPU arrays go
                through host memory, and arrive on the receiver's GPU.
            dest: rank of the receiver, which calls :meth:`recv`.
            tag: 0 to 15999; the receiver gives the same.

        Raises:
            TypeError: no array; on the receiver too.
            ValueError: no such rank or tag.
            CommunicationTimeoutError: the receiver did not come.
        """
        self._check_peer("send", dest, tag)
        self._arrays.send(data, dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Receive what ``source`` sent: an array, or a tuple of arrays.

        Args:
            source: a rank, or MPI's ANY_SOURCE.
            tag: that of the sender, or MPI's ANY_TAG.

        Raises:
            CommunicatorError: the sender has left the program.
            TypeError: the sender's argument was no array.
            ValueError: no such rank or tag.
            CommunicationTimeoutError: nothing came.
        """
        self._check_peer("recv", source, tag)
        return self._arrays.recv(source, tag)

    @collective
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give every rank the root's array or tuple of arrays.

        Args:
            data: at the root, arrays of any shape, layout and fixed-size dtype;
                ignored elsewhere.
            max_buf_len: bytes of one message; ``None`` for 256 MiB.
            root: rank that has the data.

        Returns:
            ``data`` itself at the root; new C-contiguous arrays elsewhere.
        """
        return self._arrays.bcast(data, max_buf_len, root)

    @collective
    def gather(self, data: Any, root: int = 0) -> tuple[Any, ...] | None:
        """Collect one array, or tuple of arrays, from every rank at the root.

        Shapes and dtypes may differ between ranks.

        Returns:
            At the root a tuple in rank order; ``None`` elsewhere.
        """
        return self._arrays.gather(data, root)

    @collective
    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Collect one array, or tuple of arrays, from every rank on all ranks.

        Shapes and dtypes may differ between ranks.

        Returns:
            A tuple in rank order.
        Cost: each rank sends (size-1) * nbytes.
        """
        return self._arrays.allgather(x)

    @collective
    def alltoall(self, xs: Any) -> tuple[Any, ...]:
        """Send ``xs[r]`` to rank ``r``; return what each rank sent here.

        Args:
            xs: ``size`` arrays or tuples of arrays (or one array with ``size`` rows);
                shapes and dtypes may differ.
        """
        return self._arrays.alltoall(xs)

    @collective
    def scatter(self, xs: Any, root: int = 0) -> Any:
        """Give rank ``r`` the root's ``xs[r]``.

        Args:
            xs: at the root ``size`` arrays or tuples of arrays (or one array with
                ``size`` rows); ignored elsewhere.
        """
        return self._arrays.scatter(xs, root)

    @collective
    def allreduce(self, data: Any, op: str = "sum") -> Any:
        """Reduce an array, or each of a tuple of arrays, over all ranks.

        Args:
            data: arrays, same shapes and dtypes on all ranks; any layout, any dtype
                that has the reduction; not changed.
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"``.

        Returns:
            New arrays of the same shape, the same bits on all ranks. The dtype is
            kept, but as in NumPy the sum and product of bool are int64, and the mean
            of bool and integers is float64. Half precision is reduced in float32.
        """
        return self._reductions.allreduce(data, op)

    @collective
    def reduce_scatter(self, data: Any, op: str = "sum") -> Any:
        """Reduce equal blocks over all ranks and keep this rank's block.

        Args:
            data: shape ``(size, *block)`` (or a tuple of such), same shapes and
                dtypes on all ranks; not changed.
            op: as in :meth:`allreduce`.

        Returns:
            New array of shape ``block``; dtypes as in :meth:`allreduce`.
        Cost: size-1 steps; each rank sends (size-1)/size * nbytes.
        Source: ring algorithm; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
        """
        return self._reductions.reduce_scatter(data, op)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.agree("barrier")

    # -- object collectives ---

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send any picklable object, of any size, to one rank. As :meth:`send`."""
        self._check_peer("send_obj", dest, tag)
        self._objects.send(obj, dest, tag)

    def recv_obj(self, source: int, tag: int = 0, status: Any = None) -> Any:
        """Receive the object that ``source`` sent. As :meth:`recv`.

        Args:
            source: a rank, or MPI's ANY_SOURCE.
            tag: that of the sender, or MPI's ANY_TAG.
            status: an ``mpi4py.MPI.Status`` that gets the sender's rank and tag.
        """
        self._check_peer("recv_obj", source, tag)
        return self._objects.recv(source, tag, status)

    @collective
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give every rank the root's object.

        Args:
            obj: any picklable object at the root; ignored elsewhere.
            max_buf_len: bytes of one message; ``None`` for 256 MiB.

        Raises:
            TypeError: it cannot be pickled, or not be unpickled on some rank; on all.
        """
        return self._objects.bcast(obj, max_buf_len, root)

    @collective
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect one object from every rank at the root; ``None`` elsewhere."""
        return self._objects.gather(obj, root)

    @collective
    def allgather_obj(self, obj: Any) -> list[Any]:
        """Collect one object from every rank on all ranks, in rank order."""
        return self._objects.allgather(obj)

    @collective
    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        """Send ``objs[r]`` to rank ``r``; return what each rank sent here."""
        return self._objects.alltoall(objs)

    @collective
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Give rank ``r`` the root's ``objs[r]``; ``objs`` is ignored elsewhere."""
        return self._objects.scatter(objs, root)

    @collective
    def allreduce_obj(self, obj: Any, op: ObjectOp = "sum") -> Any:
        """Reduce objects over all ranks; the same result everywhere.

        Args:
            obj: any picklable object that has the operation.
            op: ``"sum"`` (``+``), ``"mean"`` (``+``, then ``/ size``), ``"prod"``
                (``*``), ``"max"``, ``"min"`` (element-wise for NumPy; NaN wins), or a
                function of two objects. Neighbours are combined in rank order.

        Raises:
            RankFailedError, TypeError, ...: combining failed on some rank; on all.
        """
        return self._objects.allreduce(obj, op)

    # -- memory ---

    @collective
    def allocate_on_host(self, nbytes: int) -> Array:
        """Return memory that the ranks of this machine share.

        The machine decides, never a pretended topology. What one rank writes the
        others see after they have met (:meth:`barrier`). It is freed when no rank
        holds the array or a view of it any more, independent of :meth:`finalize`.

        Args:
            nbytes: the same on all ranks of a machine.

        Returns:
            uint8 array of ``nbytes`` zeros, writable.

        Raises:
            OSError: not enough memory, or the ranks cannot reach each other's
                memory; on all ranks.
            UnavailableError: the system has no such memory; on all ranks.
            ValueError: ``nbytes`` differs within a machine, or is negative; on all.
        """
        return allocate_on_host(self, nbytes)

    # -- many arrays at once ---

    @collective
    def allreduce_arrays(
        self,
        arrays: Sequence[Array | ArraySpec],
        op: str = "mean",
        names: Sequence[str] | None = None,
        label: str = "allreduce_arrays",
        groups: Sequence[int] | None = None,
    ) -> list[Array | None]:
        """Reduce many arrays over all ranks in place, packed into buckets.

        Args:
            arrays: the same shapes and dtypes in the same order on all ranks; any
                layout; written in place, each keeping its dtype. An
                :class:`ArraySpec` stands for an array that this rank does not have:
                it counts as zeros if some other rank has it (``sum``, ``mean``).
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"``. ``mean``
                scales by 1/size while packing, so half precision stays finite.
            names: for errors; must be equal on all ranks.
            label: what the arrays are; must be equal on all ranks.
            groups: lengths of consecutive groups of arrays; no bucket holds arrays of
                two. So the results have the same bits as if each group were reduced by
                a call of its own. ``None`` for one group.

        Returns:
            For each entry the array: the given one, a new one where this rank had
            none, or ``None`` where no rank has one.

        Raises:
            MismatchError: names, shapes, dtypes or label differ; the text names the
                arrays and the ranks. Nothing has been changed.
            TypeError: no array, read-only, or a dtype without the reduction.
        """
        return self._many.allreduce(arrays, op, names, label, groups)

    @collective
    def bcast_arrays(
        self,
        arrays: Sequence[Array],
        root: int = 0,
        names: Sequence[str] | None = None,
        label: str = "bcast_arrays",
    ) -> None:
        """Copy the root's arrays into those of all ranks, in place.

        Args:
            arrays: the same shapes and dtypes in the same order on all ranks; any
                layout and fixed-size dtype.

        Raises:
            MismatchError, TypeError, ValueError: as in :meth:`allreduce_arrays`.
        """
        self._many.bcast(arrays, root, names, label)

    # -- life ---

    @collective
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Make a communicator of the same kind and settings for each colour.

        Args:
            color: ranks with the same colour come together; ``None`` (or MPI's
                UNDEFINED) for ranks that join none.
            key: order of the ranks within the new communicator.

        Returns:
            The new communicator, or ``None`` without a colour. A pretended topology
            goes with it.
        """
        messages = load("messages")
        error = None
        undefined = messages.is_undefined(color)
        if not undefined and not (_is_int32(color) and int(color or 0) >= 0):
            error = ValueError(f"split: color {color!r}: expected 0 or more, or None")
        elif not _is_int32(key):
            error = ValueError(f"split: key {key!r}: expected a 32-bit integer")
        self.agree("split", error=error)
        part = messages.split_mpi(self.mpi_comm, None if undefined else color, key)
        if part is None:
            return None
        return type(self)(part, **self.options_for(part.allgather(self.rank)))

    @collective
    def finalize(self) -> None:
        """Leave together and free what MPI holds. Collective; safe to call twice."""
        messages = load("messages")
        is_over = self._messenger.is_broken or messages.is_finalized()
        if is_over:
            leaving.close(self._agreement)
        elif leaving.is_open(self._agreement):
            # Open until all ranks have come: one that meets the others in another
            # operation here must meet them once more at the end of the program.
            self.agree(FINALIZE)
            leaving.close(self._agreement)
            for held in self._held:
                held.finalize()
        else:
            return
        try:
            self.nccl.close(ranks_are_together=not is_over)
        finally:
            if not is_over:
                for transport in self._transports():
                    transport.finalize()
                self._messenger.finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # With an exception the other ranks are elsewhere; meeting them here would
        # hide it behind a mismatch. They learn of it at the end of the program.
        if exc_type is None:
            self.finalize()

    # -- parts ---

    def _transports(self) -> list[Group | MpiTransport]:
        return [*self._groups, *self._mpi_transports]

    def _check_peer(self, operation: str, peer: int, tag: int) -> None:
        for what, value in (("rank", peer), ("tag", tag)):
            if not isinstance(value, int | np.integer):
                raise TypeError(f"{operation}: {what} {value!r}: expected an integer")
        messages = load("messages")
        receives = operation.startswith("recv")
        any_source = receives and peer == messages.ANY_SOURCE
        any_tag = receives and tag == messages.ANY_TAG
        if not any_source and not 0 <= peer < self.size:
            raise ValueError(
                f"{operation}: no rank {peer}; expected 0 to {self.size - 1}"
            )
        if not any_tag and not 0 <= tag < _MAX_TAG:
            raise ValueError(f"{operation}: tag {tag}: expected 0 to {_MAX_TAG - 1}")


def _is_int32(value: object) -> bool:
    return isinstance(value, int | np.integer) and -(2**31) <= int(value) < 2**31


# Each tag makes two MPI tags, of which every MPI has at least 32767.
_MAX_TAG = 16000


def _settings_error(
    bucket_bytes: Any, timeout_s: Any, allreduce_grad_dtype: Any, nccl_binding: Any
) -> Exception | None:
    """Return why the settings cannot be used, or ``None``."""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 0:
        return ValueError(f"bucket_bytes {bucket_bytes!r}: expected 0 or more")
    try:
        check_timeout(timeout_s)
        parse_wire_dtype(allreduce_grad_dtype)
        is_debug_asked_for()
        nccl_takes_host_memory()
        cross_memory.why_not()
        if nccl_binding is not None:
            nccl_bindings.load(nccl_binding)
        else:
            nccl_bindings.default_name()
    except (ValueError, CommunicatorError) as error:
        return error
    return None
