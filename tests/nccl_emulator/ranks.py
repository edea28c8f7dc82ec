"""Run functions on several ranks: fresh processes, in tens of milliseconds.

A server process holds NumPy and the like imported and forks for each job, so that
jobs start fast and that each has its own environment. The process of the tests itself
is not forked: it has initialised MPI. ``python -m nccl_emulator.ranks FOLDER`` is the
server; tests use :class:`RankServer`.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pathlib
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .library import Communicator, Library

TESTS = pathlib.Path(__file__).resolve().parents[1]


@dataclass
class Outcome:
    """What a rank left: the value of its function or a traceback, and its stderr."""

    value: Any = None
    error: str | None = None
    stderr: str = ""
    exit_code: int | None = None


class Ranks:
    """What a rank's function gets: the library, and the way to the other ranks."""

    def __init__(self, rank: int, size: int, folder: str, barrier, inboxes) -> None:
        self.rank = rank
        self.size = size
        self._folder = folder
        self._barrier = barrier
        self._inboxes = inboxes
        self._library: Library | None = None
        self._heard: list[tuple[int, Any]] = []

    @property
    def library(self) -> Library:
        """The library, loaded on first use: after the environment was set."""
        if self._library is None:
            self._library = Library(self._folder)
        return self._library

    def barrier(self) -> None:
        """Wait for all ranks, without NCCL."""
        self._barrier.wait()

    def tell(self, rank: int, message: Any) -> None:
        """Give an object to a rank, without NCCL."""
        self._inboxes[rank].put((self.rank, message))

    def hear(self, source: int) -> Any:
        """Wait for the next object that ``source`` gives to this rank."""
        while True:
            for index, (sender, message) in enumerate(self._heard):
                if sender == source:
                    del self._heard[index]
                    return message
            self._heard.append(self._inboxes[self.rank].get())

    def unique_id(self, members: list[int]) -> bytes:
        """Return one new unique id on all members; the first one makes it."""
        if self.rank != members[0]:
            return self.hear(members[0])
        unique_id = self.library.unique_id()
        for member in members[1:]:
            self.tell(member, unique_id)
        return unique_id

    def join(self, members: list[int] | None = None) -> Communicator:
        """Make a communicator of the given ranks, in this order; default: all."""
        members = list(range(self.size)) if members is None else members
        unique_id = self.unique_id(members)
        return self.library.init(len(members), unique_id, members.index(self.rank))


@dataclass
class _Job:
    function: Callable[..., Any]
    n_ranks: int
    args: tuple[Any, ...]
    env: dict[str, str]
    timeout_s: float


def _run_rank(job: _Job, ranks: Ranks, stderr: int, results) -> None:
    """Be one rank: in a process of its own."""
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    os.environ.update(job.env)
    try:
        outcome = Outcome(value=job.function(ranks, *job.args))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    results.put((ranks.rank, outcome))


def _run_job(job: _Job, folder: str) -> list[Outcome]:
    """Fork the ranks, wait for them until the time limit, and end those left."""
    context = mp.get_context("fork")
    barrier = context.Barrier(job.n_ranks)
    inboxes = [context.SimpleQueue() for _ in range(job.n_ranks)]
    results = [context.SimpleQueue() for _ in range(job.n_ranks)]
    outcomes = [Outcome(error="no result") for _ in range(job.n_ranks)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in outcomes]
        processes = []
        for rank, file in enumerate(files):
            ranks = Ranks(rank, job.n_ranks, folder, barrier, inboxes)
            args = (job, ranks, file.fileno(), results[rank])
            processes.append(context.Process(target=_run_rank, args=args))
            processes[-1].start()
        deadline = time.monotonic() + job.timeout_s
        for rank, process in enumerate(processes):
            # A long result fills the pipe: it is taken out before the process ends.
            while process.is_alive() and results[rank].empty():
                process.join(0.002)
                if time.monotonic() > deadline:
                    outcomes[rank].error = f"not done within {job.timeout_s} s"
                    process.kill()
            if not results[rank].empty():
                outcomes[rank] = results[rank].get()[1]
            process.join(max(1.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            outcomes[rank].exit_code = process.exitcode
        for outcome, file in zip(outcomes, files, strict=True):
            file.seek(0)
            outcome.stderr = file.read().decode(errors="replace")
    return outcomes


def _read_exactly(file, n_bytes: int) -> bytes:
    data = file.read(n_bytes)
    if len(data) != n_bytes:
        raise EOFError
    return data


def _serve(folder: str) -> None:
    """Run the jobs that come in on stdin, until it is closed."""
    with contextlib.suppress(EOFError):
        while True:
            (length,) = struct.unpack("<q", _read_exactly(sys.stdin.buffer, 8))
            job = pickle.loads(_read_exactly(sys.stdin.buffer, length))
            answer = pickle.dumps(_run_job(job, folder))
            sys.stdout.buffer.write(struct.pack("<q", len(answer)) + answer)
            sys.stdout.buffer.flush()


class RankServer:
    """The tests' end of a server; a context manager."""

    def __init__(
        self, folder: os.PathLike[str], env: Mapping[str, str] | None = None
    ) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
        path = os.pathsep.join([str(TESTS), clean.get("PYTHONPATH", "")])
        self.folder = pathlib.Path(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nccl_emulator.ranks", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **clean,
                "PYTHONPATH": path,
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
            start_new_session=True,
        )

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *args: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def outcomes(
        self,
        function: Callable[..., Any],
        n_ranks: int,
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
    ) -> list[Outcome]:
        """Run ``function(ranks, *args)`` on each rank and return what each left.

        Args:
            function: of a module that imports without pytest; found by its name.
            env: variables for the ranks, set before the library is loaded.
            timeout_s: ranks that are not done by then are killed.
        """
        job = pickle.dumps(_Job(function, n_ranks, args, dict(env or {}), timeout_s))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(struct.pack("<q", len(job)) + job)
        self._process.stdin.flush()
        (length,) = struct.unpack("<q", _read_exactly(self._process.stdout, 8))
        return pickle.loads(_read_exactly(self._process.stdout, length))

    def run(self, function: Callable[..., Any], n_ranks: int, *args, **options) -> list:
        """As :meth:`outcomes`, for ranks that must not fail: return their values."""
        outcomes = self.outcomes(function, n_ranks, *args, **options)
        failed = [
            f"rank {rank}: exit {outcome.exit_code}\n{outcome.error}\n{outcome.stderr}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None or outcome.exit_code != 0
        ]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]


if __name__ == "__main__":
    # Functions of jobs are found by the names of their modules, this one's too.
    from nccl_emulator import ranks

    ranks._serve(sys.argv[1])
