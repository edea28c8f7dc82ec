"""Several reductions in flight at once, advanced together.

An operation is a generator that posts non-blocking MPI calls, yields their requests,
and goes on when they are complete. Whoever waits for one operation advances all of
them, so chunks and buckets overlap without a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, Protocol

from communicators.errors import CommunicatorError, RankFailedError, is_agreed
from communicators.transports.waiting import LISTEN_EVERY_S, Backoff

# How long a rank that has failed may take until it says why.
_REASON_WAIT_S = 1.0

#: An operation in steps: yields requests to be completed before it is resumed.
Steps = Generator[Sequence[Any], None, Any]


class Handle(Protocol):
    """An operation in flight."""

    def wait(self) -> Any:
        """Block until it is complete and return its result."""


class Finished:
    """The handle of an operation that was complete when it returned."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self) -> Any:
        """Return the result."""
        return self._result


class _Operation:
    def __init__(self, progress: Progress, steps: Steps, label: str) -> None:
        self._progress = progress
        self._steps = steps
        self.label = label
        #: What it waits for: requests of MPI, and others that are asked like them.
        self.requests: list[Any] = []
        self.others: list[Any] = []
        self.done = False
        self.result: Any = None

    def advance(self) -> bool:
        """Go on as far as completed requests allow; tell whether anything moved."""
        moved = False
        while not self.done:
            # A request of MPI is null from the moment when it was found complete.
            self.requests = [r for r in self.requests if r]
            self.others = [r for r in self.others if not r.Test()]
            if self.requests or self.others:
                break
            moved = True
            try:
                for request in next(self._steps):
                    is_mpi = isinstance(request, self._progress.request_type)
                    (self.requests if is_mpi else self.others).append(request)
            except StopIteration as stop:
                self.done = True
                self.result = stop.value
        return moved

    def close(self) -> None:
        """End the steps where they are."""
        self._steps.close()

    def wait(self) -> Any:
        self._progress.drive_until(self)
        return self.result


class Progress:
    """The operations of one communicator that are in flight.

    Args:
        timeout_s: how long nothing at all may move while an operation is waited for,
            in seconds; ``None`` for no limit.
        listen: called now and then with what describes the operation waited for; may
            raise what other ranks have to say.
        on_timeout: raises the error for an operation, given its label and the time
            waited in seconds.
        on_give_up: told for which error operations were given up in the middle: the
            ranks are not in step any more.
    """

    def __init__(
        self,
        timeout_s: float | None,
        listen: Callable[[Callable[[], str]], None],
        on_timeout: Callable[[str, float], NoReturn],
        on_give_up: Callable[[BaseException], None],
    ) -> None:
        # Here, so that the handles of this module are there without mpi4py.
        from mpi4py import MPI

        self.request_type = MPI.Request
        self._mpi_error = MPI.Exception
        self.timeout_s = timeout_s
        self._listen = listen
        self._on_timeout = on_timeout
        self._on_give_up = on_give_up
        self._in_flight: list[_Operation] = []
        self._given_up: list[_Operation] = []

    def start(self, steps: Steps, label: str) -> Handle:
        """Begin an operation and return its handle; its first messages are posted.

        What is in flight already goes on as far as it can.
        """
        operation = _Operation(self, steps, label)
        self._in_flight.append(operation)
        try:
            operation.advance()
            self._poll()
        except BaseException as error:
            self._fail(error, operation)
        return operation

    def drive_until(self, target: _Operation) -> None:
        """Advance everything in flight until ``target`` is complete.

        Raises:
            CommunicationTimeoutError: nothing moved for ``timeout_s``.
            RankFailedError: another rank does not go on.
        """
        try:
            self._drive_until(target)
        except BaseException as error:
            self._fail(error, target)

    def _drive_until(self, target: _Operation) -> None:
        backoff = Backoff()
        next_listen = LISTEN_EVERY_S
        while not target.done:
            if self._poll():
                backoff, next_listen = Backoff(), LISTEN_EVERY_S
                continue
            backoff.pause()
            waited_s = backoff.waited_s
            if waited_s > next_listen:
                next_listen = waited_s + LISTEN_EVERY_S
                self._listen(lambda: target.label)
            if self.timeout_s is not None and waited_s > self.timeout_s:
                self._on_timeout(target.label, waited_s)

    def _fail(self, error: BaseException, operation: _Operation) -> NoReturn:
        """Give everything up because of an error; raise it, or the reason for it."""
        reason: BaseException | None = None
        if isinstance(error, RankFailedError) and not is_agreed(error):
            reason = self._reason(operation)
        self.give_up(error)
        if reason is not None:
            raise reason from None
        raise error

    def _reason(self, operation: _Operation) -> CommunicatorError | None:
        """Return what a rank that has failed says, where a flag says that one has."""
        end = time.monotonic() + _REASON_WAIT_S
        while time.monotonic() < end:
            try:
                self._listen(lambda: operation.label)
            except CommunicatorError as told:
                return told
            time.sleep(0.001)
        return None

    def give_up(self, error: BaseException) -> None:
        """Let what is in flight know that it does not go on, because of an error."""
        given_up, self._in_flight = self._in_flight, []
        # Kept: MPI may still read and write what their requests are about.
        self._given_up += given_up
        try:
            for operation in given_up:
                operation.close()
        finally:
            self._on_give_up(error)

    def _poll(self) -> bool:
        """Advance everything that can go on; tell whether anything moved."""
        in_flight = self._in_flight
        if len(in_flight) == 1:
            requests = in_flight[0].requests
        else:
            requests = [r for operation in in_flight for r in operation.requests]
        if requests:
            # Each call of MPI looks at all sockets, however few requests it is for.
            try:
                found = self.request_type.Testsome(requests)
            except self._mpi_error as error:
                raise CommunicatorError(
                    f"MPI cannot go on with {in_flight[0].label}, perhaps because "
                    f"another rank has ended: {error}"
                ) from error
            if not found and not any(operation.others for operation in in_flight):
                return False
        moved = [operation.advance() for operation in in_flight]
        self._in_flight = [op for op in self._in_flight if not op.done]
        return any(moved)
