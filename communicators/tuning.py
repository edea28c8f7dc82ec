"""What ``auto`` may choose from, and what it has learnt before.

The fastest candidate is kept in a file by what it depends on, so that the next run of
the same program begins with it.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from communicators.buckets import DEFAULT_BUCKET_BYTES
from communicators.candidate import Candidate
from communicators.topology import Topology, default_dims

_logger = logging.getLogger("chainermn_ng")

#: Environment variable: the file that keeps the choices, or ``0`` for none.
CACHE_VARIABLE = "CHAINERMN_NG_AUTO_CACHE"
_MAX_KEPT = 200


def rule_of_thumb(topology: Topology) -> tuple[Candidate, str]:
    """Return the communicator that suits a topology without a measurement, and why."""
    if topology.n_hosts == 1:
        return Candidate("flat"), "all ranks share one host"
    if max(topology.host_sizes) == 1:
        return Candidate("multi_ring"), "one rank on each host"
    if topology.is_uniform:
        return Candidate("multi_ring"), "several hosts with equal numbers of ranks"
    return Candidate("hierarchical"), "hosts with unequal numbers of ranks"


def first_candidates(topology: Topology) -> list[Candidate]:
    """Return the communicators to compare first, each with its own defaults."""
    found = [rule_of_thumb(topology)[0], Candidate("flat")]
    if topology.n_hosts > 1 and max(topology.host_sizes) > 1:
        found.append(Candidate("hierarchical"))
    if topology.is_uniform:
        found.append(Candidate("multi_ring"))
        dims = default_dims(topology)
        own, n_hosts = topology.host_sizes[0], topology.n_hosts
        whole = tuple(p for p in (own, n_hosts) if p > 1) or (1,)
        if whole != dims:
            found.append(Candidate.of("multi_ring", dims=whole))
    return list(dict.fromkeys(found))


def check_allowed(candidate: Candidate, topology: Topology) -> None:
    """Refuse what a measurement could not have chosen.

    Raises:
        ValueError: another communicator, or an option that is not about speed.
    """
    names = {known.name for known in first_candidates(topology)}
    odd = set(dict(candidate.options)) - {"bucket_bytes", "dims", "n_chunks"}
    if candidate.name not in names or odd:
        raise ValueError(f"{candidate} is none of the candidates on {topology}")


def refinements(best: Candidate, nbytes: int, bucket_bytes: int) -> list[Candidate]:
    """Return variants of the best one: other buckets, other chunks.

    Args:
        best: of the first ones.
        nbytes: of all arrays.
        bucket_bytes: of the first ones; another one than the default is the user's
            choice and stays.
    """
    found = []
    if bucket_bytes == DEFAULT_BUCKET_BYTES:
        found = [
            best.varied(bucket_bytes=size)
            for size in (bucket_bytes // 8, bucket_bytes // 4, bucket_bytes * 4)
            if min(size, bucket_bytes) < nbytes
        ]
    if best.name == "multi_ring":
        found += [best.varied(n_chunks=n) for n in (4, 16)]
    return found


class ChoiceCache:
    """The file of earlier choices. Only rank 0 has it.

    A file that cannot be read or written costs a measurement, never the job.
    """

    def __init__(self) -> None:
        value = os.environ.get(CACHE_VARIABLE, "")
        self.path: pathlib.Path | None = None
        if value != "0":
            self.path = pathlib.Path(value) if value else _default_path()

    def get(self, key: str) -> Candidate | None:
        """Return what was chosen for a key, if it is known."""
        entry = self._read().get(key)
        try:
            return None if entry is None else Candidate.from_json(entry)
        except ValueError as error:
            _logger.warning("auto: %s is damaged (%s)", self.path, error)
            return None

    def put(self, key: str, choice: Candidate) -> None:
        """Remember a choice; other programs may do the same at the same time."""
        if self.path is None:
            return
        entries = dict(self._read())
        entries.pop(key, None)
        entries[key] = choice.as_json()
        while len(entries) > _MAX_KEPT:
            entries.pop(next(iter(entries)))
        written = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Readers see the old file or the new one, never a part.
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.name, delete=False
            ) as file:
                written = pathlib.Path(file.name)
                json.dump(entries, file, indent=1)
            written.replace(self.path)
        except OSError as error:
            if written is not None:
                written.unlink(missing_ok=True)
            _logger.warning("auto: cannot keep its choice in %s: %s", self.path, error)

    def _read(self) -> Mapping[str, Any]:
        if self.path is None:
            return {}
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _logger.warning("auto: cannot read %s: %s", self.path, error)
            return {}
        return entries if isinstance(entries, dict) else {}


def _default_path() -> pathlib.Path | None:
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = pathlib.Path(root) if root else pathlib.Path.home() / ".cache"
    except RuntimeError:  # there is no home
        return None
    return folder / "chainermn_ng" / "auto.json"


def table_text(times_s: Sequence[tuple[Candidate, float]]) -> str:
    """Return measured times as one line, the fastest first."""
    in_order = sorted(times_s, key=lambda item: item[1])
    return ", ".join(f"{candidate} {1e3 * t:.4g} ms" for candidate, t in in_order)
