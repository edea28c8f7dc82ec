"""Moving arrays between ranks: every fixed-size dtype, any shape and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import guarded
from communicators.arguments import NO_ROOT, check_one_per_rank, enter
from communicators.buckets import ArraySpec
from communicators.devices.device import Device
from communicators.devices.kinds import CPU, GPU, as_array
from communicators.dtypes import Array, check_fixed_size
from communicators.errors import CommunicatorError, MismatchError
from communicators.roads import HostRoad, MpiRoad, NcclRoad, Road, to_bytes, to_host

if TYPE_CHECKING:
    from communicators.agreement import Agreement
    from communicators.base import CommunicatorBase
    from communicators.transports.messages import Messenger

# What the receiver must know: whether it is a tuple, and each array's spec.
_Header = tuple[bool, list[ArraySpec]]
# The header, and the arrays themselves.
_Prepared = tuple[_Header, list[Any]]


def as_array_list(data: object, operation: str) -> tuple[bool, list[Any]]:
    """Return whether ``data`` is a sequence, and its arrays.

    NumPy scalars count as zero-dimensional arrays.

    Raises:
        TypeError: anything else, or a dtype of Python objects.
    """
    is_tuple = isinstance(data, tuple | list)
    items: Sequence[Any] = data if is_tuple else [data]  # type: ignore[assignment]
    hint = f", or use {operation}_obj, which takes any object"
    arrays = [as_array(item, operation, hint) for item in items]
    for array in arrays:
        check_fixed_size(array.dtype, operation)
    return is_tuple, arrays


def _assemble(header: _Header, arrays: list[Any]) -> Any:
    return tuple(arrays) if header[0] else arrays[0]


def _shown(rows: Sequence[_Prepared]) -> str:
    """Return the specs of all arrays, for errors."""
    return ", ".join(str(spec) for (_, specs), _ in rows for spec in specs)


def _kinds(rows: Sequence[_Prepared]) -> str:
    """Return what is compared in debug mode: all but the lengths of the axes."""
    kinds = {
        f"{len(specs)} array(s): "
        + ", ".join(f"{len(spec.shape)}-dimensional {spec.dtype}" for spec in specs)
        for (_, specs), _ in rows
    }
    return " or ".join(sorted(kinds))


def _by_rank(rows: Sequence[_Prepared]) -> list[tuple[int, Any]]:
    return [(dest, array) for dest, (_, arrays) in enumerate(rows) for array in arrays]


class ArrayCollectives:
    """The data-moving array collectives of one communicator.

    Contracts are in :class:`communicators.base.CommunicatorBase`.
    """

    def __init__(
        self, comm: CommunicatorBase, messenger: Messenger, agreement: Agreement
    ) -> None:
        self._comm = comm
        self._messenger = messenger
        self._agreement = agreement
        self.rank = messenger.rank
        self.size = messenger.size

    @guarded
    def bcast(self, data: Any, max_buf_len: int | None, root: int) -> Any:
        own = data if self.rank == root else ()
        header, arrays = self._enter("bcast", own, root, max_buf_len)
        header = self._messenger.share_from(header, root)
        road = self._road("bcast", [header])
        if self.rank != root:
            arrays = [road.empty(spec) for spec in header[1]]
        for array in arrays:
            road.broadcast(array, root, max_buf_len)
        return data if self.rank == root else _assemble(header, arrays)

    @guarded
    def gather(self, data: Any, root: int) -> Any:
        header, arrays = self._enter("gather", data, root)
        headers = self._messenger.share(header)
        road = self._road("gather", headers)
        outgoing = [(root, array) for array in arrays]
        if self.rank != root:
            road.exchange(outgoing, [], "gather")
            return None
        return self._collect("gather", road, outgoing, headers)

    @guarded
    def allgather(self, data: Any) -> Any:
        header, arrays = self._enter("allgather", data)
        headers = self._messenger.share(header)
        road = self._road("allgather", headers)
        if isinstance(road, NcclRoad) and all(other == header for other in headers):
            columns = [road.allgather(array, self.size) for array in arrays]
            return tuple(
                _assemble(header, [column[rank] for column in columns])
                for rank in range(self.size)
            )
        outgoing = [(dest, array) for dest in range(self.size) for array in arrays]
        return self._collect("allgather", road, outgoing, headers)

    @guarded
    def alltoall(self, data: Any) -> Any:
        rows = self._enter_rows("alltoall", data)
        table = self._messenger.share([header for header, _ in rows])
        road = self._road("alltoall", [header for row in table for header in row])
        headers = [headers[self.rank] for headers in table]
        return self._collect("alltoall", road, _by_rank(rows), headers)

    @guarded
    def scatter(self, data: Any, root: int) -> Any:
        rows = self._enter_rows("scatter", data, root)
        headers = self._messenger.share_from([header for header, _ in rows], root)
        road = self._road("scatter", headers)
        received = [road.empty(spec) for spec in headers[self.rank][1]]
        incoming = [(root, array) for array in received]
        road.exchange(_by_rank(rows), incoming, "scatter")
        return _assemble(headers[self.rank], received)

    def send(self, data: Any, dest: int, tag: int) -> None:
        try:
            header, arrays = self._prepare("send", data)
        except (TypeError, ValueError) as error:
            # The receiver waits for this message; it gets the reason instead.
            self._messenger.send((None, str(error)), [], dest, tag)
            raise
        views = [to_bytes(to_host(array)) for array in arrays]
        self._messenger.send((header, None), views, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        received: list[Array] = []

        def allocate(message: tuple[_Header | int | None, str | None]) -> list[Array]:
            if message[0] is None:
                return []
            if isinstance(message[0], int):
                # An object: taken all the same, so that the next message is found.
                return [np.empty(message[0], np.uint8)]
            received.extend(np.empty(spec.shape, spec.dtype) for spec in message[0][1])
            return [to_bytes(array) for array in received]

        (header, refused), sender, _ = self._messenger.receive(source, tag, allocate)
        if header is None:
            raise TypeError(f"recv: rank {sender} could not send: {refused}")
        if isinstance(header, int):
            raise TypeError(
                f"recv: rank {sender} sent an object, by send_obj; receive it by "
                "recv_obj"
            )
        return _assemble(
            header,
            [
                self._to_device(array) if spec.kind == GPU else array
                for array, spec in zip(received, header[1], strict=True)
            ],
        )

    def _to_device(self, array: Array) -> Any:
        device = self._comm.devices.of_kind(GPU, "recv")
        with device.activate():
            return device.xp.asarray(array)

    # -- parts ---

    def _prepare(self, operation: str, data: Any) -> _Prepared:
        is_tuple, arrays = as_array_list(data, operation)
        if operation != "send":
            self._comm.devices.for_arrays(arrays, operation)
        return (is_tuple, [ArraySpec.of(array) for array in arrays]), arrays

    def _enter(
        self,
        operation: str,
        data: Any,
        root: Any = NO_ROOT,
        max_buf_len: int | None = None,
    ) -> _Prepared:
        return enter(
            self._agreement,
            operation,
            lambda: self._prepare(operation, data),
            size=self.size,
            root=root,
            max_buf_len=max_buf_len,
            # What only the root has, the others do not.
            compared=None if operation == "bcast" else lambda p: _kinds([p]),
            shown=lambda prepared: _shown([prepared]),
        )

    def _enter_rows(
        self, operation: str, data: Any, root: Any = NO_ROOT
    ) -> list[_Prepared]:
        def prepare() -> list[_Prepared]:
            if root is not NO_ROOT and root != self.rank:
                return []
            check_one_per_rank(data, self.size, operation, "arrays")
            return [self._prepare(operation, item) for item in data]

        return enter(
            self._agreement,
            operation,
            prepare,
            size=self.size,
            root=root,
            compared=None if operation == "scatter" else _kinds,
            shown=_shown,
        )

    def _road(self, operation: str, headers: Sequence[_Header]) -> Road:
        """Return the way for the arrays of all ranks. Collective.

        Raises:
            MismatchError: arrays of both kinds; on all ranks.
        """
        kinds = sorted({spec.kind for header in headers for spec in header[1]})
        if len(kinds) > 1:
            raise MismatchError(
                f"{operation}: some of the arrays are on the CPU, others on a GPU"
            )
        device = self._device(operation, kinds[0] if kinds else CPU)
        if not device.uses_nccl:
            return MpiRoad(self._messenger)
        if self._comm.nccl.world is None:
            return HostRoad(self._messenger, device)
        return NcclRoad(self._comm.nccl, device)  # type: ignore[arg-type]

    def _device(self, operation: str, kind: str) -> Device:
        devices = self._comm.devices
        if kind == CPU:
            return self._comm.nccl.open(devices.host)
        device, error = None, None
        try:
            device = devices.of_kind(kind, operation)
        except CommunicatorError as failure:
            error = failure
        if not self._comm.nccl.is_open:
            # Where only the root has arrays, the others learn of the GPU just now, and
            # may have none.
            self._comm.agree(f"{operation} of GPU arrays", error=error)
        assert device is not None
        return self._comm.nccl.open(device)

    def _collect(
        self,
        operation: str,
        road: Road,
        outgoing: list[tuple[int, Any]],
        headers: list[_Header],
    ) -> tuple[Any, ...]:
        incoming = []
        received = []
        for source, header in enumerate(headers):
            arrays = [road.empty(spec) for spec in header[1]]
            received.append(_assemble(header, arrays))
            incoming += [(source, array) for array in arrays]
        road.exchange(outgoing, incoming, operation)
        return tuple(received)
