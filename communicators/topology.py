"""Which ranks share a host: a pure value, real or pretended."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from communicators.errors import TopologyError

#: Environment variable that pretends a topology for every communicator over all
#: ranks, in the notation of :meth:`Topology.parse`.
TOPOLOGY_VARIABLE = "CHAINERMN_NG_TOPOLOGY"

_GRID = re.compile(r"^(\d+)x(\d+)$")
_COUNTS = re.compile(r"^\d+(\+\d+)+$")


@dataclass(frozen=True)
class Topology:
    """The host of each rank, hosts numbered in the order of their first rank.

    Attributes:
        hosts: the host's number for each rank; ``hosts[r]`` in ``0..n_hosts-1``.
    """

    hosts: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[Hashable]) -> Topology:
        """Build from one name (or any key) a rank, equal for ranks of one host.

        Raises:
            TopologyError: no names.
        """
        if not names:
            raise TopologyError("a topology needs at least one rank")
        numbers: dict[Hashable, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @classmethod
    def parse(cls, text: str, size: int) -> Topology:
        """Read a pretended topology of ``size`` ranks.

        Args:
            text: ``"2x4"`` (2 hosts of 4 ranks each), ``"3+1"`` (hosts of 3 and of
                1 ranks), or one host name a rank: ``"a,b,a,b"``.
            size: the number of ranks that it must describe.

        Raises:
            TopologyError: malformed, or not ``size`` ranks.
        """
        compact = text.replace(" ", "")
        grid = _GRID.match(compact)
        if grid:
            counts = [int(grid[2])] * int(grid[1])
        elif _COUNTS.match(compact):
            counts = [int(count) for count in compact.split("+")]
        elif "," in compact or (size == 1 and compact.isidentifier()):
            names = compact.split(",")
            if not all(names):
                raise TopologyError(f"topology {text!r}: a host name is empty")
            return cls.from_names(names)._checked(text, size)
        else:
            raise TopologyError(
                f"topology {text!r}: expected HOSTSxRANKS such as '2x4', rank counts "
                "by host such as '3+1', or one host name a rank such as 'a,a,b,b'"
            )
        if 0 in counts or not counts:
            raise TopologyError(f"topology {text!r}: a host has no ranks")
        hosts = [host for host, count in enumerate(counts) for _ in range(count)]
        return cls(tuple(hosts))._checked(text, size)

    def _checked(self, text: str, size: int) -> Topology:
        if self.size != size:
            raise TopologyError(
                f"topology {text!r} describes {self.size} ranks; this job has {size}"
            )
        return self

    @classmethod
    def coerce(cls, value: Topology | str | Sequence[Hashable], size: int) -> Topology:
        """Accept a topology, its notation, or a sequence of host names.

        Raises:
            TopologyError: malformed, or not ``size`` ranks.
            TypeError: none of the three.
        """
        if isinstance(value, Topology):
            return value._checked(str(value), size)
        if isinstance(value, str):
            return cls.parse(value, size)
        if isinstance(value, Sequence):
            return cls.from_names(list(value))._checked(repr(value), size)
        raise TypeError(
            f"topology: expected a Topology, a str such as '2x4' or a list of host "
            f"names; got {type(value).__name__}"
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def n_hosts(self) -> int:
        """Number of hosts."""
        return max(self.hosts) + 1

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each host."""
        return tuple(self.hosts.count(host) for host in range(self.n_hosts))

    @property
    def is_uniform(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(self.host_sizes)) == 1

    def inter_rank(self, rank: int) -> int:
        """Return the host's number of ``rank``."""
        return self.hosts[rank]

    def intra_rank(self, rank: int) -> int:
        """Return the position of ``rank`` among the ranks of its host."""
        return self.hosts[:rank].count(self.hosts[rank])

    def intra_size(self, rank: int) -> int:
        """Return the number of ranks on the host of ``rank``."""
        return self.hosts.count(self.hosts[rank])

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return the ranks of one host, ascending."""
        return tuple(r for r, h in enumerate(self.hosts) if h == host)

    def position(self, rank: int) -> int:
        """Return the place of ``rank`` when all ranks are sorted host by host."""
        host = self.hosts[rank]
        before = sum(h < host for h in self.hosts)
        return before + self.intra_rank(rank)

    def restrict(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of a sub-group, given its members' ranks in order."""
        return Topology.from_names([self.hosts[rank] for rank in ranks])

    def __str__(self) -> str:
        sizes = self.host_sizes
        by_host = [host for host, n in enumerate(sizes) for _ in range(n)]
        if list(self.hosts) != by_host:
            return ",".join(f"h{host}" for host in self.hosts)
        if self.is_uniform:
            return f"{self.n_hosts}x{sizes[0]}"
        return "+".join(map(str, sizes))


def pretended_from_environment() -> str | None:
    """Return the topology that the environment pretends, if it does."""
    return os.environ.get(TOPOLOGY_VARIABLE) or None


def default_dims(topology: Topology) -> tuple[int, ...]:
    """Return grid dimensions for a uniform topology: (ranks a host, factors of hosts).

    Dimension 0 is the ranks of one host; the number of hosts is split into its
    prime factors, because on a flat network small factors have the least latency
    (the traffic is the same for all). Factors of 1 are left out; one rank gives
    ``(1,)``.

    Raises:
        TopologyError: hosts with different numbers of ranks.
    """
    if not topology.is_uniform:
        raise TopologyError(
            f"hosts have unequal numbers of ranks ({topology}); a grid over hosts "
            "needs equal ones. Use hierarchical or flat, give multi_ring explicit "
            f"dims with product {topology.size}, or start the same number of ranks "
            "on every host"
        )
    dims = [topology.host_sizes[0], *prime_factors(topology.n_hosts)]
    return tuple(p for p in dims if p > 1) or (1,)


def prime_factors(n: int) -> list[int]:
    """Return the prime factors of ``n`` >= 1, ascending; ``[]`` for 1."""
    factors = []
    p = 2
    while p * p <= n:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    if n > 1:
        factors.append(n)
    return factors


def parse_dims(value: str | Sequence[int], size: int) -> tuple[int, ...]:
    """Read grid dimensions ``"4x2x2"`` or ``(4, 2, 2)`` with product ``size``.

    Raises:
        TopologyError: malformed, or another product.
    """
    if isinstance(value, str):
        parts = value.replace(" ", "").lower().split("x")
        if not all(part.isdigit() for part in parts):
            raise TopologyError(f"dims {value!r}: expected factors such as '4x2x2'")
        dims = [int(part) for part in parts]
    else:
        try:
            dims = [operator.index(p) for p in value]
        except TypeError:
            raise TopologyError(
                f"dims {value!r}: expected factors such as (4, 2, 2)"
            ) from None
    product = 1
    for p in dims:
        product *= p
    if any(p < 1 for p in dims) or product != size:
        raise TopologyError(
            f"dims {value!r}: the product must be the number of ranks, {size}"
        )
    return tuple(p for p in dims if p > 1) or (1,)


def coordinates(position: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the mixed-radix digits of ``position``, dimension 0 fastest."""
    digits = []
    for p in dims:
        position, digit = divmod(position, p)
        digits.append(digit)
    return tuple(digits)
