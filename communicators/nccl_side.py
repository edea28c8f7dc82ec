"""What a communicator does with NCCL: nothing, until it is given a device array."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from communicators import leaving
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import Device, NcclDevice
from communicators.dtypes import Array
from communicators.transports import load

if TYPE_CHECKING:
    from communicators.agreement import Agreement
    from communicators.transports.group import Group
    from communicators.transports.messages import Messenger
    from communicators.transports.nccl import NcclTransport
    from communicators.transports.nccl_session import NcclSession


# Called before each collective on device arrays, of whatever communicator.
_before_use: list[weakref.WeakMethod[Callable[[], None]]] = []


def call_before_use(method: Callable[[], None]) -> None:
    """Let a method be called before each collective on device arrays.

    Two NCCL communicators of one process must not be used in another order than on the
    other ranks. Who uses one in the background waits there for its operations to end.

    Args:
        method: of an object that is not kept alive by this.
    """
    _before_use[:] = [waiting for waiting in _before_use if waiting() is not None]
    _before_use.append(weakref.WeakMethod(method))


class GroupEntry(NamedTuple):
    """A group that the ranks have made; ``group`` is ``None`` on ranks in none."""

    group: Group | None
    label: str
    color: int | None
    key: int
    lane: int
    is_world: bool


class NcclSide:
    """NCCL for one communicator, set up by all ranks at the first use of a device.

    Args:
        name: of the communicator, for errors.
        binding_name: ``"cupy"`` or ``"pynccl"``.
        messenger: of the communicator.
        agreement: of the communicator.
        give_up: told the error of a reduction that ended in the middle.
        real_host: number of this rank's machine.
        spans_hosts: whether there is NCCL over all ranks, or in groups only.
    """

    def __init__(
        self,
        name: str,
        binding_name: str,
        messenger: Messenger,
        agreement: Agreement,
        give_up: Callable[[BaseException], None],
        real_host: int,
        *,
        spans_hosts: bool,
    ) -> None:
        self._name = name
        self._spans_hosts = spans_hosts
        self._binding_name = binding_name
        self._messenger = messenger
        self._agreement = agreement
        self._give_up = give_up
        self._real_host = real_host
        self._session: NcclSession | None = None
        self._entries: list[GroupEntry] = []
        self._followers: list[NcclSide] = []

    def open(self, device: Device) -> Device:
        """Be ready for arrays on a device. Collective if it is one that needs NCCL.

        Called by the collectives once all ranks have agreed on the kind of arrays.

        Returns:
            Device: the given one.

        Raises:
            UnavailableError: NCCL or its binding is missing on some rank.
            CommunicatorError: two ranks of one host on the same device.
            MismatchError: different versions of NCCL. All these on all ranks.
            NcclError: NCCL refuses, or has failed before.
            CommunicationTimeoutError: an earlier operation did not end in time.
        """
        if not device.uses_nccl:
            return device
        for waiting in list(_before_use):
            callback = waiting()
            if callback is not None:
                callback()
        if self._session is None:
            self._session = self._set_up(device)
        self._session.raise_if_failed()
        return device

    def _set_up(self, device: Device) -> NcclSession:
        session: NcclSession = load("nccl_session").NcclSession(
            self._name,
            self._binding_name,
            device,
            self._messenger,
            self._agreement,
            self._real_host,
            spans_hosts=self._spans_hosts,
        )
        try:
            for entry in self._entries:
                session.add_group(*entry)
            for follower in self._followers:
                follower.open(device)
        except BaseException:
            # The next call begins anew, or meets the same error.
            session.close(ranks_are_together=False)
            raise
        leaving.attach(self._agreement, session)
        return session

    @contextlib.contextmanager
    def working_on(self, device: Device) -> Iterator[None]:
        """Make a device current, after the ranks have agreed on what to do there.

        What fails now, for want of memory perhaps, fails on this rank alone, while the
        others wait in the middle of it. The communicator is given up then, so that the
        end of this rank's program is the end of the job.
        """
        try:
            with device.activate():
                yield
        except BaseException as error:
            self._give_up(error)
            raise

    def add_group(self, entry: GroupEntry) -> None:
        """Let a group have NCCL too, now or when a device is used. Collective."""
        if self._session is not None:
            self._session.add_group(*entry)
        self._entries.append(entry)

    def lead(self, follower: NcclSide) -> None:
        """Set up NCCL for another communicator of the same ranks when this one does."""
        self._followers.append(follower)

    @property
    def world(self) -> NcclTransport | None:
        """NCCL over all ranks, if there is such, once a device has been used."""
        return None if self._session is None else self._session.world

    @property
    def is_open(self) -> bool:
        """Whether a device has been used."""
        return self._session is not None

    def to_host(self, buffer: DeviceBuffer) -> Array:
        """Return a buffer's contents in memory of the host; wait for them there.

        Raises:
            NcclError: NCCL has failed meanwhile.
            CommunicationTimeoutError: what fills the buffer did not end in time.
        """
        device = self.device
        host = device.host_buffer(buffer.size, buffer.dtype)
        copied = device.copy_to_host(buffer, host)
        backoff = load("waiting").Backoff()
        while not device.is_done(copied):
            backoff.pause()
            self.raise_if_failed()
        return host

    @property
    def device(self) -> NcclDevice:
        """The device that has been used."""
        assert self._session is not None, "no device array has been used yet"
        return self._session.device

    def raise_if_failed(self) -> None:
        """Raise what NCCL, or the thread that watches it, has found since.

        For who has waited for the device: an abort ends such waits, too, and leaves
        the arrays as they happen to be.

        Raises:
            NcclError: NCCL failed.
            CommunicationTimeoutError: an operation did not end within ``timeout_s``.
        """
        if self._session is not None:
            self._session.check()

    def close(self, *, ranks_are_together: bool) -> None:
        """Destroy the NCCL communicators; see :meth:`NcclSession.close`."""
        if self._session is not None:
            self._session.close(ranks_are_together=ranks_are_together)
