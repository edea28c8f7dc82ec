"""A trace of some training steps, for Perfetto and for a table."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import pathlib
import re
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from chainer import training
from chainer.training import extension

from chainermn_ng.communicators.factory import lasting_engine_of
from chainermn_ng.timeline.clocks import CommonClock, read_clock
from chainermn_ng.timeline.events import Step, events_of
from chainermn_ng.timeline.trace_files import (
    Header,
    Trace,
    merge_traces,
    new_run,
    write_trace,
)
from communicators.recording import SpanRecorder

#: In a file name: every rank writes a file of its own.
_RANK = "{rank}"


class Timeline(extension.Extension):
    """Trainer extension that records where the time of some training steps goes.

    ::

        trainer.extend(Timeline(comm))                      # steps 10, 11 and 12
        trainer.extend(Timeline(comm, range(100, 105), "late.json.gz"))

    Attach it on all ranks. When the last of the steps has ended it writes one file with
    the spans of all ranks: data, forward and backward pass, the ranks' agreement, each
    bucket's packing, flight and unpacking, the update. Load it in
    https://ui.perfetto.dev or ``chrome://tracing``, or let ``chainermn-ng timeline``
    make a table of it. In all other steps it costs one comparison.

    Where the training ends before the first of the steps, rank 0 warns.

    In a loop without a trainer, put each step into :meth:`step`.

    Making one is collective.

    Args:
        comm: a communicator of this package: the one of the optimizer.
        steps: numbers of the updates to record, from 1; one number for only that.
        filename: of the trace, in the trainer's output folder (without a trainer: in
            the current one); compressed if it ends in ``.gz``. With ``{rank}`` in it
            every rank writes a file of its own, and nothing is gathered. An absolute
            name needs a folder that is there; folders of others are made.

    Raises:
        ValueError: no steps, or one below 1; another placeholder than ``{rank}``; on
            all ranks.
        OSError: the folder of the file is not there, or not writable; on all ranks.
        TypeError: steps are no whole numbers, the file name is no text; on all ranks.
            ``comm`` is no communicator of this package.
        MismatchError: the ranks have different steps or files; on all ranks.
    """

    trigger = 1, "iteration"
    #: After all others, so that what they do counts to the step before.
    priority = -10_000
    name = "Timeline"
    is_collective = True

    def __init__(
        self,
        comm: Any,
        steps: int | Iterable[int] = range(10, 13),
        filename: str | os.PathLike[str] = "timeline.json",
    ) -> None:
        self._folder = pathlib.Path()
        self._engine = lasting_engine_of(comm)
        self._steps: list[int] = []
        self._filename = ""
        error: Exception | None = None
        try:
            self._steps = _numbers_of(steps)
            self._filename = _checked_name(filename)
            if self._engine.rank == 0 or _RANK in self._filename:
                _check_folder(self._path())
        except (OSError, TypeError, ValueError) as failure:
            error = failure
        self._engine.agree("Timeline", self._details(), error=error)
        self._has_recorded = self._has_warned = False
        # The iteration at which the trainer began.
        self._start = 0
        self._outer_error: BaseException | None = None
        self._forget()
        self._n_entered = 0
        # At the end of which iteration there is something to do.
        self._boundary: float = math.inf

    def _forget(self) -> None:
        self._clock: CommonClock | None = None
        self._run = ""
        self._recorder: SpanRecorder | None = None
        self._recorded: list[Step] = []
        self._current: tuple[int, int] | None = None

    # -- as an extension ---------------------------------------------------------------

    def initialize(self, trainer: training.Trainer) -> None:
        """Called by the trainer when its run begins."""
        self._folder = pathlib.Path(trainer.out)
        self._outer_error = sys.exception()
        self._forget()
        self._start = trainer.updater.iteration
        self._has_recorded = False
        self._go_on(self._start)

    def __call__(self, trainer: training.Trainer) -> None:
        if trainer.updater.iteration < self._boundary:
            return
        if self._current is not None:
            self._end()
        self._go_on(trainer.updater.iteration)

    def finalize(self) -> None:
        """Called by the trainer when its run ends; writes what there is."""
        self._boundary = math.inf
        is_error = sys.exception() is not self._outer_error
        self._outer_error = None
        self._stop()
        self._current = None
        if not is_error:
            self._warn_of_none()
        if is_error and _RANK not in self._filename:
            # The other ranks are elsewhere and would not come.
            self._forget()
        elif self._clock is not None:
            self._write(is_together=not is_error)

    def _go_on(self, iteration: int) -> None:
        """Wait for the next step to record, begin it, or write if there is none."""
        following = next((n for n in self._steps if n > iteration), None)
        if following is None:
            self._boundary = math.inf
            self._stop()
            if self._clock is not None:
                self._write()
        elif following == iteration + 1:
            self._boundary = following
            self._begin(following)
        else:
            self._boundary = following - 1
            self._stop()

    # -- in loops of one's own ---------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record what happens inside, if it is one of the steps.

        For training loops without a trainer; each time counts one::

            timeline = Timeline(comm)
            for batch in batches:
                with timeline.step():
                    optimizer.update(model, *batch)
            timeline.write()

        After the last of the steps the file is written, collectively.
        """
        self._n_entered += 1
        number = self._n_entered
        if number not in self._steps:
            yield
            return
        self._begin(number)
        try:
            yield
        except BaseException:
            self._current = None
            self._stop()
            raise
        self._end()
        self._stop()
        if number == self._steps[-1]:
            self._write()

    def write(self) -> None:
        """Write the steps that have been recorded, if that is not done. Collective.

        For a loop that may end before the last of the steps. Rank 0 warns if none of
        them came.

        Raises:
            OSError: the file cannot be written; on all ranks.
        """
        self._warn_of_none()
        if self._clock is not None:
            self._write()

    # -- recording ---------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        if self._clock is None:
            self._meet()
        self._engine.recorder = self._recorder
        self._current = number, time.perf_counter_ns()

    def _end(self) -> None:
        assert self._current is not None
        number, start_ns = self._current
        self._recorded.append(Step(number, start_ns, time.perf_counter_ns()))
        self._current = None
        self._has_recorded = True

    def _warn_of_none(self) -> None:
        """Say once that no step was recorded, unless they were before the run."""
        if self._has_recorded or self._has_warned or self._steps[-1] <= self._start:
            return
        self._has_warned = True
        if self._engine.rank == 0:
            warnings.warn(
                "Timeline: no step was recorded, and nothing is written: the training "
                f"has ended before steps {self._steps}",
                stacklevel=3,
            )

    def _stop(self) -> None:
        if self._recorder is not None and self._engine.recorder is self._recorder:
            self._engine.recorder = None

    def _meet(self) -> None:
        """Compare clocks, when the first step is about to begin. Collective."""
        engine = self._engine
        error = None
        if engine.recorder is not None:
            error = ValueError(
                "Timeline: the communicator has a recorder already; one Timeline at a "
                "time can record"
            )
        engine.agree("Timeline begins to record", self._details(), error=error)
        start_ns, self._run = engine.allgather_obj(
            (time.perf_counter_ns(), new_run() if engine.rank == 0 else "")
        )[0]
        self._clock = CommonClock(start_ns, [read_clock(engine)])
        self._recorder = SpanRecorder()

    # -- the file ----------------------------------------------------------------------

    def _write(self, *, is_together: bool = True) -> None:
        """Write what has been recorded, and begin anew.

        Args:
            is_together: all ranks come; else this one writes its own file alone.
        """
        assert self._clock is not None
        if is_together:
            self._engine.agree("Timeline writes", f"steps {self._numbers()}")
            self._clock.readings.append(read_clock(self._engine))
        trace: Trace | None = self._trace()
        by_rank = _RANK in self._filename
        if is_together and not by_rank:
            parts = self._engine.gather_obj(trace)
            trace = merge_traces(parts) if parts is not None else None
        self._forget()
        error: Exception | None = None
        if trace is not None and trace.header.steps:
            try:
                path = self._path()
                path.parent.mkdir(parents=True, exist_ok=True)
                write_trace(path, trace)
            except (OSError, TypeError, ValueError) as failure:
                # Details of a span that JSON does not have, too.
                error = failure
        if is_together:
            self._engine.agree("Timeline has written", error=error)
        elif error is not None:
            raise error

    def _path(self) -> pathlib.Path:
        return self._folder / self._filename.replace(_RANK, str(self._engine.rank))

    def _details(self) -> str:
        return f"steps {self._steps}, file {self._filename}"

    def _numbers(self) -> list[int]:
        return [step.number for step in self._recorded]

    def _trace(self) -> Trace:
        engine = self._engine
        assert self._clock is not None
        assert self._recorder is not None
        host = socket.gethostname()
        header = Header(
            run=self._run,
            size=engine.size,
            ranks=[engine.rank],
            steps=self._numbers(),
            communicator=engine.name,
            topology=str(engine.topology),
            hosts=[host],
            clock_error_us=[self._clock.error_ns / 1000],
        )
        events = events_of(
            engine.rank, host, self._recorded, self._recorder.spans, self._clock.of
        )
        return Trace(header, events)


def _numbers_of(steps: Any) -> list[int]:
    """Return the numbers of steps, ascending, each once."""
    try:
        is_one = hasattr(steps, "__index__")
        numbers = [operator.index(n) for n in ([steps] if is_one else steps)]
    except TypeError:
        raise TypeError(
            f"Timeline: steps {steps!r}: expected a whole number or several, such as "
            "range(10, 13)"
        ) from None
    if not numbers or min(numbers) < 1:
        raise ValueError(
            f"Timeline: steps {steps!r}: expected one or more, counted from 1"
        )
    return sorted(set(numbers))


def _checked_name(filename: Any) -> str:
    try:
        name = os.fspath(filename)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise TypeError(f"Timeline: filename {filename!r}: expected a text")
    unknown = [found for found in re.findall(r"{[^{}]*}", name) if found != _RANK]
    if unknown:
        raise ValueError(
            f"Timeline: filename {name!r}: unknown {', '.join(unknown)}; "
            f"there is {_RANK}"
        )
    if not name:
        raise ValueError("Timeline: filename '': expected the name of a file")
    return name


def _check_folder(path: pathlib.Path) -> None:
    """Refuse an absolute name in a folder that is not there: nobody would make it."""
    folder = path.parent
    if not path.is_absolute():
        return
    if not folder.is_dir():
        raise FileNotFoundError(f"Timeline: {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"Timeline: {path}: cannot write to {folder}")
