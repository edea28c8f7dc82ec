"""Finding NCCL operations that fail or never end, and ending the job then.

A rank that waits for a device operation does so inside of CUDA, where no time limit
reaches it. So a thread looks at the operations in flight from outside. When one is
older than its limit, or NCCL reports an error, it aborts the NCCL communicators, which
lets the device and the main thread go on, and the main thread raises at its next
operation. If it does not come to that, the thread ends the job.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from communicators.errors import (
    CommunicationTimeoutError,
    CommunicatorError,
    NcclError,
)

#: How often the thread looks, in seconds.
POLL_S = 0.1

#: How long the aborts may take before the job goes on to its end, in seconds.
ABORT_S = 2.0

#: How long the main thread has to raise what was found, in seconds.
GRACE_S = 4.0


def _run(abort: Callable[[], None]) -> None:
    try:
        abort()
    except Exception as error:
        # The job ends anyway, for a better reason.
        sys.stderr.write(f"chainermn_ng: NCCL cannot be aborted: {error}\n")


class Operation:
    """One NCCL call in flight.

    Attributes:
        text: what it is, with its number and its group, for errors.
        event: after it; ``None`` while the call has not returned.
    """

    __slots__ = ("event", "started", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.started = time.monotonic()
        self.event: Any = None


class Watchdog:
    """Watches the NCCL operations of one communicator. Starts its thread at once.

    Args:
        timeout_s: how long an operation may take, in seconds; ``None`` for ever.
        is_done: asks the device for an event.
        check: raises the :class:`NcclError` that NCCL reports by itself, if any.
        give_up: tells the communicator that it cannot be used any more.
        aborts: returns what ends each NCCL communicator; each is called in a thread of
            its own, and may never return.
        end_job: ends all ranks; called if the main thread does not raise.

    Attributes:
        failure: what has been found; raised by :meth:`raise_if_failed`.
    """

    def __init__(
        self,
        timeout_s: float | None,
        *,
        is_done: Callable[[Any], bool],
        check: Callable[[], None],
        give_up: Callable[[], None],
        aborts: Callable[[], Sequence[Callable[[], None]]],
        end_job: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._is_done = is_done
        self._check = check
        self._give_up = give_up
        self._aborts = aborts
        self._end_job = end_job
        self._in_flight: deque[Operation] = deque()
        self._last: Operation | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._raised = threading.Event()
        self.failure: CommunicatorError | None = None
        # A daemon: a hanging call must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._watch, name="chainermn_ng NCCL watchdog", daemon=True
        )
        self._thread.start()

    def begin(self, text: str) -> Operation:
        """Note that a call is about to be made."""
        operation = self._last = Operation(text)
        self._in_flight.append(operation)
        return operation

    def submitted(self, operation: Operation, event: Any) -> None:
        """Note that the call has returned; ``event`` comes after its work."""
        operation.event = event

    def drop(self, operation: Operation) -> None:
        """Note that the call has failed."""
        self._in_flight.remove(operation)

    def raise_if_failed(self) -> None:
        """Raise what has been found.

        Raises:
            CommunicationTimeoutError: an operation did not end in time.
            NcclError: NCCL failed.
        """
        if self.failure is not None:
            raise self.take_failure()

    def take_failure(self) -> CommunicatorError:
        """Return what has been found, to be raised by the caller."""
        assert self.failure is not None
        self._raised.set()
        return self.failure

    def fail(self, failure: CommunicatorError) -> None:
        """Abort everything because of ``failure``. From any thread."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        self._give_up()
        # NCCL may wait inside an abort for work of another communicator on the same
        # device, which is to be aborted next. So none waits for another, and nobody
        # for all of them.
        threads = [
            threading.Thread(target=_run, args=(abort,), daemon=True)
            for abort in self._aborts()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ABORT_S
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def late(self, error: NcclError) -> NcclError:
        """Return what NCCL reports by itself, with the operation it may concern."""
        what = f"{self._last.text}, or before it: " if self._last else ""
        return NcclError(error.call, error.code, f"{what}{error.reason}")

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * POLL_S + 1)

    # -- the thread ---

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                failure = self._find_failure()
            except Exception as error:
                # What CUDA says when it is asked for an event, if the device failed.
                failure = CommunicatorError(
                    f"while NCCL was watched: {type(error).__name__}: {error}"
                )
            if failure is not None:
                self.fail(failure)
            if self.failure is not None:
                self._see_to_the_end()
                return

    def _find_failure(self) -> CommunicatorError | None:
        oldest = self._oldest()
        try:
            self._check()
        except NcclError as error:
            return self.late(error)
        if oldest is None or self._timeout_s is None:
            return None
        age = time.monotonic() - oldest.started
        if age <= self._timeout_s:
            return None
        return CommunicationTimeoutError(
            f"{oldest.text}: not complete after {age:.0f} s "
            f"(timeout_s={self._timeout_s:g}); another rank may have failed or not "
            "come to it. NCCL_DEBUG=INFO makes NCCL tell more"
        )

    def _oldest(self) -> Operation | None:
        """Forget operations that are done; return the oldest that is not."""
        while self._in_flight:
            first = self._in_flight[0]
            if first.event is None or not self._is_done(first.event):
                return first
            self._in_flight.popleft()
        return None

    def _see_to_the_end(self) -> None:
        if self._raised.wait(GRACE_S) or self._stop.is_set():
            return
        sys.stderr.write(f"chainermn_ng: {self.failure}; ending the job\n")
        sys.stderr.flush()
        self._end_job()
