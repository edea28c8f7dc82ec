"""NCCL as one communicator uses it: set up together, watched, and taken down."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from communicators import nccl_bindings
from communicators.call_place import call_place
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import NcclDevice
from communicators.errors import (
    CommunicatorError,
    NcclError,
    UnavailableError,
)
from communicators.nccl_bindings.library import version_parts, version_text
from communicators.transports.group import Group
from communicators.transports.messages import Messenger, abort
from communicators.transports.nccl import NcclTransport
from communicators.transports.nccl_watchdog import Operation, Watchdog

if TYPE_CHECKING:
    from communicators.agreement import Agreement
    from communicators.nccl_bindings import NcclBinding, NcclCommunicator

# From this version on, kernels of several communicators run in the order in which the
# host issued them, if this variable says so (NCCL's release notes for 2.26). Before,
# two communicators in flight at once could deadlock.
_ORDERED_SINCE = (2, 26)
_ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"

_LABEL = "set up NCCL"


class NcclSession:
    """The NCCL communicators of one communicator's groups, on one device.

    Made at the first use of a device, by all ranks together. The NCCL communicator over
    all ranks comes first, if there is one; the groups' ones are split from it where the
    binding can, else made with ids that travel by MPI.

    Args:
        name: the communicator's, for errors.
        binding_name: ``"cupy"`` or ``"pynccl"``.
        device: where this rank's arrays are.
        messenger: of the communicator.
        agreement: of the communicator.
        real_host: number of this rank's machine.
        spans_hosts: make an NCCL communicator over all ranks.

    Raises:
        UnavailableError: no binding or no NCCL on some rank, or one that cannot read
            the arrays' memory.
        MismatchError: the ranks have different versions of NCCL.
        CommunicatorError: two ranks of one host on the same device.
        NcclError: NCCL refuses.
        All on all ranks.
    """

    def __init__(
        self,
        name: str,
        binding_name: str,
        device: NcclDevice,
        messenger: Messenger,
        agreement: Agreement,
        real_host: int,
        *,
        spans_hosts: bool,
    ) -> None:
        self._name = name
        self.device = device
        self._messenger = messenger
        self._agreement = agreement
        self._n_issued = 0
        self._communicators: list[NcclCommunicator] = []
        self._is_closed = False
        self.binding = self._agree_on_binding(binding_name)
        # Lanes run at the same time only where NCCL keeps them in order.
        self.has_lanes = (
            version_parts(self.binding.version) >= _ORDERED_SINCE
            and os.environ.get(_ORDER_VARIABLE) == "1"
        )
        self._streams = self._prepare_device(real_host)
        self._watchdog = Watchdog(
            messenger.timeout_s,
            is_done=self._is_done,
            check=self._check,
            give_up=messenger.give_up,
            aborts=lambda: [c.abort for c in self._communicators],
            end_job=lambda: abort(1),
        )
        messenger.raise_if_failed = self._watchdog.raise_if_failed
        self.world: NcclTransport | None = None
        try:
            if spans_hosts:
                world = self._create_world()
                self.world = NcclTransport(self, world, "world", lane=0)
            self._agreement.check(_LABEL)
        except BaseException:
            self.close(ranks_are_together=False)
            raise

    # -- setting up ---

    def _agree_on_binding(self, binding_name: str) -> NcclBinding:
        # NCCL reads it when its first communicator is made.
        os.environ.setdefault(_ORDER_VARIABLE, "1")
        found: NcclBinding | None = None
        error: CommunicatorError | None = None
        version = ""
        try:
            found = nccl_bindings.load(binding_name)
            _check_memory(found, self.device)
            # Ranks that split communicators cannot join those that make them anew.
            way = "split" if found.has_split else "made anew"
            version = f"{version_text(found.version)}, groups are {way}"
        except CommunicatorError as failure:
            error = failure
        self._agreement.check(_LABEL, f"NCCL {version}", error=error)
        assert found is not None
        return found

    def _prepare_device(self, real_host: int) -> list[Any]:
        """Make this rank's streams; refuse two ranks on one device.

        NCCL may wait for ever for those.
        """
        identity, error = "", None
        streams = []
        try:
            with self.device.activate():
                identity = self.device.identity()
                streams = [
                    self.device.create_stream() for _ in range(1 + self.has_lanes)
                ]
        except Exception as failure:
            # CUDA's own, which the other ranks may not know.
            error = CommunicatorError(f"{type(failure).__name__}: {failure}")
        self._agreement.check(_LABEL, error=error)
        everyone = self._messenger.share((real_host, identity, str(self.device)))
        if self.binding.memory == "device":
            return streams  # the emulator's ranks may share one
        users: dict[tuple[int, str], list[int]] = {}
        for rank, (host, device, _) in enumerate(everyone):
            users.setdefault((host, device), []).append(rank)
        for (_, device), ranks in users.items():
            if len(ranks) > 1:
                raise CommunicatorError(
                    f"{_LABEL}: ranks {', '.join(map(str, ranks))} of one host all use "
                    f"{everyone[ranks[0]][2]} (device {device}), and NCCL needs a "
                    "device for each rank. Choose one before the arrays are made: "
                    "chainermn_ng.choose_device(comm), or "
                    "cupy.cuda.Device(comm.world_intra_rank).use()"
                )
        return streams

    def _create_world(self) -> Any:
        size, rank = self._messenger.size, self._messenger.rank
        unique_id, error = b"", None
        if rank == 0:
            unique_id, error = self._try_to(self.binding.create_unique_id, b"")
        unique_id = self._messenger.share_from(unique_id, 0)
        self._agreement.check(_LABEL, error=error)
        return self._made_together(
            f"make the NCCL communicator of {size} ranks",
            lambda: self.binding.init_rank(size, unique_id, rank),
        )

    def add_group(
        self,
        group: Group | None,
        label: str,
        color: int | None,
        key: int,
        lane: int,
        is_world: bool,
    ) -> None:
        """Make the NCCL communicator of a group. Collective over all ranks.

        Args:
            group: ``None`` on ranks that are in none.
            label: the group's name.
            color: as in ``create_group``.
            key: as in ``create_group``.
            lane: 0, or 1 for operations that may run beside those of lane 0.
            is_world: it is all ranks in their order, and needs no other communicator.
        """
        if is_world:
            if group is not None:
                group.nccl = self.world
            return
        what = f"make the NCCL communicator of group {label}"
        made: NcclCommunicator | None = None
        if self.binding.has_split and self.world is not None:
            world = self.world.nccl
            made = self._made_together(what, lambda: world.split(color, key))
        else:
            unique_id, error = b"", None
            if group is not None and group.rank == 0:
                unique_id, error = self._try_to(self.binding.create_unique_id, b"")
            self._agreement.check(f"{_LABEL}: group {label}", error=error)
            if group is not None:
                members = group.size, group.mpi.share_from_first(unique_id), group.rank
                made = self._made_together(
                    what, lambda: self.binding.init_rank(*members)
                )
        self._agreement.check(f"{_LABEL}: group {label}")
        if group is not None:
            assert made is not None
            group.nccl = NcclTransport(self, made, label, lane)

    def _try_to(self, make: Callable[[], Any], otherwise: Any) -> tuple[Any, Any]:
        """Return what ``make`` makes and no error, or ``otherwise`` and the error."""
        try:
            with self.device.activate():
                return make(), None
        except CommunicatorError as error:
            return otherwise, error

    def _made_together(self, text: str, make: Callable[[], Any]) -> Any:
        """Make an NCCL communicator together with its other ranks.

        Where that fails on one rank, the others wait inside of NCCL and come to no
        agreement. So this rank raises alone, and the job ends by that.
        """
        operation = self._watchdog.begin(f"{self._name}: {text}")
        try:
            with self.device.activate():
                made = make()
        except NcclError as error:
            self._fail(operation, error)
        except BaseException:
            self._watchdog.drop(operation)
            raise
        self._watchdog.drop(operation)
        if made is not None:
            self._communicators.append(made)
        return made

    # -- operations ---

    def issue(
        self,
        text: str,
        transport: NcclTransport,
        buffers: Sequence[DeviceBuffer],
        call: Callable[[int], None],
    ) -> None:
        """Issue one NCCL call, after what was done with the buffers before.

        Args:
            text: the operation, for errors.
            transport: whose operation it is.
            buffers: what it reads and writes; their fences are moved behind it.
            call: makes the call on the stream whose pointer it is given.

        Raises:
            NcclError: NCCL refuses, or has failed before.
            CommunicationTimeoutError: an earlier operation did not end in time.
        """
        self.raise_if_failed()
        self._n_issued += 1
        place = call_place() if self._agreement.is_debugging else ""
        operation = self._watchdog.begin(
            f"{self._name}: {text}, NCCL operation {self._n_issued}, in group "
            f"{transport.label} (rank {transport.rank} of {transport.size})"
            f"{f', called from {place}' if place else ''}"
        )
        device = self.device
        stream = self._streams[transport.lane % len(self._streams)]
        try:
            with device.activate():
                before = None
                for buffer in buffers:
                    if not buffer.fence.events():
                        # Filled on the current stream so far.
                        before = before or device.record()
                        buffer.fence.event = before
                    device.wait_for(buffer, stream)
                transport.nccl.check_async_error()
                call(device.stream_pointer(stream))
                event = device.record(stream)
        except NcclError as error:
            self._fail(operation, error)
        except BaseException:
            # Nothing is in flight: a dtype, say, that NCCL does not have.
            self._watchdog.drop(operation)
            raise
        for buffer in buffers:
            buffer.fence.event = event
            buffer.fence.parts.clear()
        self._watchdog.submitted(operation, event)

    def check(self) -> None:
        """Raise what the watchdog has found, and what NCCL says now.

        Raises:
            CommunicationTimeoutError, NcclError: see there.
        """
        self.raise_if_failed()
        try:
            # What has failed a moment ago, the watchdog may not have seen yet.
            self._check()
        except NcclError as error:
            self._watchdog.fail(self._watchdog.late(error))
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise what the watchdog has found.

        Raises:
            CommunicationTimeoutError, NcclError: see there.
        """
        self._watchdog.raise_if_failed()

    def _fail(self, operation: Operation, error: NcclError) -> NoReturn:
        self._watchdog.drop(operation)
        # If the watchdog has aborted the communicators, its reason is the reason.
        self._watchdog.fail(
            NcclError(error.call, error.code, f"{operation.text}: {error.reason}")
        )
        raise self._watchdog.take_failure() from error

    def _is_done(self, event: Any) -> bool:
        with self.device.activate():
            return self.device.is_done(event)

    def _check(self) -> None:
        for communicator in list(self._communicators):
            communicator.check_async_error()

    # -- the end ---

    def synchronize(self) -> None:
        """Block the host until all operations are done, or one of them fails.

        Raises:
            CommunicationTimeoutError, NcclError: one failed.
        """
        with self.device.activate():
            self.device.synchronize()
        self.check()

    def close(self, *, ranks_are_together: bool) -> None:
        """Destroy the NCCL communicators. Safe to call twice.

        Args:
            ranks_are_together: all ranks do this now, and no operation failed; else
                the communicators are aborted, which waits for nobody.

        Raises:
            NcclError: NCCL, or CUDA with its own class, fails; everything has been
                closed as far as it could be.
        """
        if self._is_closed:
            return
        self._is_closed = True
        errors: list[Exception] = []
        in_peace = ranks_are_together and self._watchdog.failure is None
        if in_peace:
            try:
                self.synchronize()
            except Exception as error:
                # CUDA's own, too.
                errors.append(error)
                in_peace = False
        self._watchdog.stop()
        for communicator in reversed(self._communicators):
            try:
                if in_peace:
                    communicator.destroy()
                elif self._watchdog.failure is None:
                    communicator.abort()
            except NcclError as error:
                errors.append(error)
        if errors and ranks_are_together:
            raise errors[0]


def _check_memory(binding: NcclBinding, device: NcclDevice) -> None:
    wanted = ("host",) if device.kind == "cpu" else ("cuda", "device")
    if binding.memory not in wanted:
        raise UnavailableError(
            f"{_LABEL}: {binding.library} works on {binding.memory} memory, and the "
            f"arrays are in {device}"
        )
