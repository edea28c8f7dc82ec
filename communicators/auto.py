"""Measures the communicators on the job's own arrays, and takes the fastest."""

from __future__ import annotations

import importlib.metadata
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from communicators._version import __version__
from communicators.base import CommunicatorBase
from communicators.candidate import Candidate
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import Device, FlatBuffer
from communicators.errors import CommunicatorError
from communicators.registry import create_communicator
from communicators.transports import load
from communicators.transports.progress import Handle
from communicators.tuning import (
    ChoiceCache,
    check_allowed,
    first_candidates,
    refinements,
    rule_of_thumb,
    table_text,
)

if TYPE_CHECKING:
    from communicators.transports.group import Group

_logger = logging.getLogger("chainermn_ng")

#: Below this the choice follows the topology: a measurement would take longer than
#: it could ever save.
MIN_MEASURED_BYTES = 256 * 1024
#: Each candidate is run once to warm up and then so often; the median counts.
N_REPETITIONS = 3
#: A candidate whose first run takes so many times the best time is not run again.
HOPELESS = 1.5


class AutoCommunicator(CommunicatorBase):
    """Reduces as the communicator that is the fastest on this job's arrays.

    On one host whose ranks reach each other's memory there is one way for all names,
    and nothing to choose. Else the first ``allreduce_arrays`` of at least 256 KiB is
    preceded by a measurement: the communicators that fit the topology, then the best
    one's buckets and chunks, run on the same arrays into memory of their own. A time is
    that of the slowest rank, so all ranks choose the same. Sums below, and arrays
    reduced one by one, go by the topology: ``flat`` on one host, ``multi_ring`` on
    several with equal numbers of ranks, else ``hierarchical``.

    Rank 0 logs the measured table to ``chainermn_ng`` and keeps the choice in a file
    (``CHAINERMN_NG_AUTO_CACHE``, by default ``~/.cache/chainermn_ng/auto.json``; ``0``
    for none) by hosts, ranks, size (as a power of two), dtype on the wire and versions;
    the next run begins with it.

    GPU arrays go by one NCCL all-reduce over all ranks, as with ``pure_nccl``: NCCL
    has its own measure of the topology.

    Communicators that add in different orders round differently. Where runs have to
    agree in every bit over several hosts, name the communicator.

    Attributes:
        chosen (str): the name of the communicator that it takes now.
        choices (dict[str, Candidate]): what it has taken for each load.
    """

    name = "auto"
    device_types = ("cpu", "gpu")
    reduces_by_world_ring = False

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        first, reason = rule_of_thumb(self.topology)
        self._cache = ChoiceCache() if self.rank == 0 else None
        self._inner_of: dict[Candidate, CommunicatorBase] = {}
        self._default = self._made(first)
        self.chosen = first.name
        self.choices: dict[str, Candidate] = {}
        if self.rank == 0:
            _logger.info(
                "auto: begins with %s for %d ranks on %s: %s",
                first,
                self.size,
                self.topology,
                reason,
            )

    def prepare(self, device: Device, *, by_ring: bool = False) -> Device:
        if device.uses_nccl:
            self.world_ring()
        else:
            self._default.prepare(device)
        return super().prepare(device, by_ring=by_ring)

    def in_place_group(self) -> Group | None:
        return self._default.in_place_group()

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        if isinstance(buffer, DeviceBuffer):
            steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
            return self.start_steps(steps)
        return self._default.start_all_reduce_flat(buffer, op)

    def reducer_for(
        self, nbytes: int, measure: Callable[[CommunicatorBase], float]
    ) -> CommunicatorBase:
        if nbytes < MIN_MEASURED_BYTES or self.size == 1:
            return self._default
        load_name = f"{nbytes.bit_length()} bits of bytes, {self.allreduce_grad_dtype}"
        choice = self.choices.get(load_name)
        if choice is None:
            choice = self._remembered(load_name)
            if choice is None:
                choice = self._measured(nbytes, measure, load_name)
            self._inner_of[choice].prepare(self.devices.host)
            self.choices[load_name] = choice
            self.chosen = choice.name
            self._drop_unused()
        return self._inner_of[choice]

    # -- choosing --------------------------------------------------------------------

    def _measured(
        self,
        nbytes: int,
        measure: Callable[[CommunicatorBase], float],
        load_name: str,
    ) -> Candidate:
        """Run the candidates; return that whose slowest rank took the least time."""
        times: dict[Candidate, float] = {}

        def run(candidates: list[Candidate]) -> None:
            for candidate in candidates:
                if candidate not in times:
                    times[candidate] = self._time_of(
                        candidate, measure, min(times.values(), default=None)
                    )

        run(first_candidates(self.topology))
        best = min(times, key=lambda c: times[c])
        run(refinements(best, nbytes, self.bucket_bytes))
        best = min(times, key=lambda c: times[c])
        if self._cache is not None:
            _logger.info(
                "auto: %s for %.3g MB on %d ranks, %s; measured: %s",
                best,
                nbytes / 1e6,
                self.size,
                self.topology,
                table_text(list(times.items())),
            )
            self._cache.put(self._key(load_name), best)
        return best

    def _time_of(
        self,
        candidate: Candidate,
        measure: Callable[[CommunicatorBase], float],
        best_s: float | None,
    ) -> float:
        inner = self._made(candidate)
        inner.prepare(self.devices.host)
        # The first run connects, and allocates.
        first_s = self._slowest(measure(inner))
        if best_s is not None and first_s > max(HOPELESS * best_s, best_s + 0.1):
            return first_s
        times = [self._slowest(measure(inner)) for _ in range(N_REPETITIONS)]
        return sorted(times)[N_REPETITIONS // 2]

    def _slowest(self, seconds: float) -> float:
        return max(self._messenger.share(seconds))

    def _remembered(self, load_name: str) -> Candidate | None:
        known = None
        if self._cache is not None:
            known = self._cache.get(self._key(load_name))
        # All must be there: a rank that has failed is not listened for below.
        known = self._messenger.share(known)[0]
        if known is None:
            return None
        try:
            check_allowed(known, self.topology)
            self._made(known)
        except (CommunicatorError, TypeError, ValueError) as error:
            # The same on all ranks, which have made it together.
            if self._cache is not None:
                _logger.warning("auto: %s, remembered, does not work: %s", known, error)
            return None
        if self._cache is not None:
            _logger.info("auto: %s, as measured before (%s)", known, self._cache.path)
        return known

    def _made(self, candidate: Candidate) -> CommunicatorBase:
        inner = self._inner_of.get(candidate)
        if inner is None:
            options = {**self.options, **dict(candidate.options)}
            inner = create_communicator(candidate.name, self.mpi_comm, **options)
            self._inner_of[candidate] = self.hold(inner, on_devices=False)
        return inner

    def _drop_unused(self) -> None:
        used = {id(self._default)} | {
            id(self._inner_of[choice]) for choice in self.choices.values()
        }
        for candidate, inner in list(self._inner_of.items()):
            if id(inner) not in used:
                del self._inner_of[candidate]
                self.release(inner)

    def _key(self, load_name: str) -> str:
        parts = [
            f"hosts {self.topology} from {socket.gethostname()}"
            f"{', pretended' if self.is_pretended else ''}",
            f"{self.size} ranks",
            load_name,
            f"chainermn_ng {__version__}",
            f"mpi4py {importlib.metadata.version('mpi4py')}",
            load("messages").library_version(),
            f"buckets from {self.bucket_bytes} bytes",
        ]
        return "; ".join(parts)
