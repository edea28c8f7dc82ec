"""Collectives in the background, while the main thread computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import communicators
from communicators.nccl_side import call_before_use

_R = TypeVar("_R")

_this_thread = threading.local()


def _mark_this_thread() -> None:
    _this_thread.is_background = True


class Background:
    """One thread with a communicator of its own. Made collectively.

    What is submitted runs in the order of submission, which must be the same on all
    ranks; meanwhile the main thread may use its own communicator. When the program
    ends, Python waits for what has been submitted before anything else is shut down,
    so the thread is never left inside MPI.

    Args:
        engine: whose ranks take part, and which finalizes the communicator made here.
        label: names the operation in errors; must be equal on all ranks.

    Raises:
        UnavailableError: MPI does not let several threads call it; on all ranks.

    Attributes:
        engine (communicators.CommunicatorBase): of the kind and settings of the one
            given; only for use by what is submitted.
    """

    def __init__(self, engine: communicators.CommunicatorBase, label: str) -> None:
        level, error = engine.thread_level, None
        if level != "multiple":
            error = communicators.UnavailableError(
                "communication in the background needs MPI_THREAD_MULTIPLE, but MPI "
                f"was started with MPI_THREAD_{level.upper()}: use an MPI library "
                "that has it, and leave mpi4py.rc.thread_level as it is"
            )
        engine.agree(label, error=error)
        # A duplicate: all ranks in the same order, another MPI communicator.
        twin = engine.split(0, engine.rank)
        assert twin is not None
        self.engine = engine.hold(twin, on_devices=False, is_apart=True)
        call_before_use(self.wait_in_flight)
        self._executor = ThreadPoolExecutor(
            1, "chainermn_ng-background", initializer=_mark_this_thread
        )
        # Weakly: a future holds its result, and the executor holds it until it is done.
        self._last: weakref.ref[Future[Any]] | None = None

    def submit(self, function: Callable[[], _R]) -> Future[_R]:
        """Begin ``function()`` when everything submitted before it has ended."""
        future = self._executor.submit(function)
        self._last = weakref.ref(future)
        return future

    def wait_in_flight(self) -> None:
        """Return when nothing is in flight: all that was submitted has ended.

        Also on the device: a submitted function returns when its result is ready.
        Raises nothing; errors belong to those who submitted.
        """
        if getattr(_this_thread, "is_background", False):
            return  # it would wait for itself
        last = self._last() if self._last is not None else None
        if last is not None:
            wait([last])

    def finalize(self) -> None:
        """End the thread, after what is in flight. Not collective."""
        self._executor.shutdown()
