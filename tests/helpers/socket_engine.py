"""A communicator of two processes over a socket, for processes without MPI.

MPI cannot be started in processes that a test forks by the dozen. This one does what
the writing of snapshots asks of an engine communicator, and nothing else: the ranks are
real processes that wait for each other, and one notices when the other has died.
"""

from __future__ import annotations

import pickle
import socket
from typing import Any

from communicators import CommunicatorError, MismatchError


class SocketEngine:
    """One of two ranks.

    Args:
        rank: 0 or 1.
        connection: to the other one.
    """

    size = 2

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Collect one object a rank on both."""
        other = self._exchange(obj)
        return [obj, other] if self.rank == 0 else [other, obj]

    def agree(
        self, label: str, details: str = "", error: BaseException | None = None
    ) -> None:
        """Meet; raise on both if they differ or one brings an error."""
        mine = (label, details, None if error is None else repr(error))
        other = self._exchange(mine)
        if mine[2] or other[2]:
            raise CommunicatorError(f"{label} failed: {mine[2]}, {other[2]}")
        if mine != other:
            raise MismatchError(f"{mine} and {other}")

    def _exchange(self, obj: Any) -> Any:
        content = pickle.dumps(obj)
        try:
            self._connection.sendall(len(content).to_bytes(8, "little") + content)
            n_bytes = int.from_bytes(self._receive(8), "little")
            return pickle.loads(self._receive(n_bytes))
        except OSError as error:
            raise CommunicatorError(f"the other rank has gone: {error}") from error

    def _receive(self, n_bytes: int) -> bytes:
        content = b""
        while len(content) < n_bytes:
            part = self._connection.recv(n_bytes - len(content))
            if not part:
                raise CommunicatorError("the other rank has gone")
            content += part
        return content
