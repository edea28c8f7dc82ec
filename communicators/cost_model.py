"""How long an all-reduce takes on a cluster, by closed formulas; no MPI, no arrays.

The Hockney model: a step between two ranks costs a latency, and every byte the inverse
of a bandwidth (Hockney, Parallel Computing 20(3), 1994). N hosts of G ranks, P = NG
ranks, M bytes; a_i and a_x: latency of a step in a host and between hosts; b: bandwidth
of a rank in the host; K cards of B bytes/s a host; w: the most that one flow can do;
L: the cost of beginning one collective.

* Out of a host with f flows: B(f) = min(min(f, K) B, f w).
* Reduce-scatter and all-gather on a ring of p: (p-1) (a + m/(p b)) each (Thakur,
  Rabenseifner and Gropp, IJHPCA 19(1), 2005).
* Reduce and broadcast down a chain, in segments: (p-1) a + m/b each.

It ranks algorithms and shows what a network costs. Contention, jitter of the network,
and how an MPI library changes its algorithm with the size are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cluster:
    """Hosts and what joins them. Bandwidths are what can be reached, in one direction.

    Attributes:
        hosts: their number, N.
        ranks_per_host: G; equal on all hosts.
        intra_bytes_s: b, bandwidth of one rank to its neighbour in the host, bytes/s.
            With ``shared_memory``: what one rank reads, adds and writes.
        inter_bytes_s: B, bandwidth of one network card, bytes/s.
        nics: K, network cards of a host.
        intra_latency_s: a_i, of one step in the host, seconds.
        inter_latency_s: a_x, of one step between hosts, seconds.
        call_s: L, seconds that beginning one collective costs.
        flow_bytes_s: w, the most that one connection carries, bytes/s.
        shared_memory: ranks of a host reduce through common memory: each reads its
            part of everybody's buffer and later everybody's part, in one step each.
        memory_bytes_s: what all ranks of a host together get from their memory,
            bytes/s; only with ``shared_memory``.
        is_striped: one ring uses all cards of a host, as NCCL's channels do. A ring
            by MPI is one flow.
        host_copy_bytes_s: between a GPU and host memory, for ``non_cuda_aware``,
            bytes/s; infinite for arrays that are in host memory anyway.
    """

    hosts: int
    ranks_per_host: int
    intra_bytes_s: float
    inter_bytes_s: float
    nics: int = 1
    intra_latency_s: float = 5e-6
    inter_latency_s: float = 15e-6
    call_s: float = 10e-6
    flow_bytes_s: float = math.inf
    shared_memory: bool = False
    memory_bytes_s: float = math.inf
    is_striped: bool = True
    host_copy_bytes_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host", "nics"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name} {value!r}: expected a whole number, 1 or more"
                )
        for name, value in vars(self).items():
            if name.endswith("bytes_s") and not value > 0:
                raise ValueError(f"{name} {value!r}: expected more than 0 bytes/s")
            if name in _TIMES and not 0 <= value < math.inf:
                raise ValueError(f"{name} {value!r}: expected 0 seconds or more")

    @property
    def size(self) -> int:
        """Number of ranks, P."""
        return self.hosts * self.ranks_per_host

    def host_bytes_s(self, flows: int) -> float:
        """Return the bandwidth out of a host that ``flows`` connections leave, B(f)."""
        by_cards = min(flows, self.nics) * self.inter_bytes_s
        return min(by_cards, flows * self.flow_bytes_s)

    @property
    def shared_bytes_s(self) -> float:
        """Bandwidth of one rank while all ranks of its host use common memory."""
        return min(self.intra_bytes_s, self.memory_bytes_s / self.ranks_per_host)


_TIMES = ("intra_latency_s", "inter_latency_s", "call_s")


@dataclass(frozen=True)
class Phases:
    """What an all-reduce costs in the hosts and between them, in seconds.

    Pieces of a message go through both: while one is between hosts, the next is in
    the host. A flat ring uses all links at once and counts as between hosts.
    """

    intra_s: float = 0.0
    inter_s: float = 0.0

    def pipelined_s(self, n_pieces: int) -> float:
        """Return the time of ``n_pieces`` pieces that each cost this.

        The slower link works without a pause; the first piece has to reach it and the
        last to come back. Source: the pipelining of PowerAI DDL (US patent 11093438 B2
        describes it), as two stages.
        """
        slower = max(self.intra_s, self.inter_s)
        return self.intra_s + self.inter_s + (n_pieces - 1) * slower


# -- building blocks: p ranks, m bytes, latency a, bandwidth b ------------------------


def _ring(p: int, m: float, a: float, b: float) -> float:
    """Return the time of a reduce-scatter, or of an all-gather, on a ring."""
    return (p - 1) * (a + m / (p * b))


def _chain(p: int, m: float, a: float, b: float) -> float:
    """Return the time of a reduction, or of a broadcast, down a chain."""
    return 0.0 if p == 1 else (p - 1) * a + m / b


def _in_host(cluster: Cluster, nbytes: float) -> float:
    """Return the time of a reduce-scatter, or of an all-gather, in the hosts.

    Through common memory every rank reads m bytes (its 1/G of all G buffers, or the
    result of all), after one wait for the others.
    """
    c = cluster
    if c.ranks_per_host == 1:
        return 0.0
    if c.shared_memory:
        return c.intra_latency_s + nbytes / c.shared_bytes_s
    return _ring(c.ranks_per_host, nbytes, c.intra_latency_s, c.intra_bytes_s)


def _between_hosts(cluster: Cluster, nbytes: float, flows: int) -> float:
    """Return the time of an all-reduce of one rank a host; ``flows`` go on at once."""
    c = cluster
    if c.hosts == 1:
        return 0.0
    bytes_s = c.host_bytes_s(flows) / flows
    return c.call_s + 2 * _ring(c.hosts, nbytes, c.inter_latency_s, bytes_s)


# -- whole algorithms -----------------------------------------------------------------


def flat(cluster: Cluster, nbytes: float) -> Phases:
    """One ring of all ranks: L + 2[(P-N) a_i + (N-1) a_x] + 2(P-1)/P M / min(B, b).

    Source: as the ring's; neighbours share a host where they can, so N of the P links
    are between hosts, and the slowest link sets the pace.
    """
    c = cluster
    if c.size == 1:
        return Phases()
    if c.hosts == 1:
        return Phases(c.call_s + 2 * _in_host(c, nbytes))
    bytes_s = c.host_bytes_s(c.nics if c.is_striped else 1)
    if c.ranks_per_host > 1:
        bytes_s = min(bytes_s, c.intra_bytes_s)
    steps = (c.size - c.hosts) * c.intra_latency_s + (c.hosts - 1) * c.inter_latency_s
    share = (c.size - 1) / c.size
    return Phases(0.0, c.call_s + 2 * steps + 2 * share * nbytes / bytes_s)


def tree(cluster: Cluster, nbytes: float) -> Phases:
    """NCCL's tree: chains in the hosts, a double binary tree between them.

    L + 2[(G-1) a_i + ceil(log2 N) a_x] + c M / (0.92 min(B(K), b)), c = 1 for two
    hosts, which exchange halves, else 2. Source: NCCL, src/graph/tuning.cc (0.92);
    NVIDIA/nccl#545, #299 (chains, halves).
    """
    c = cluster
    if c.hosts == 1:
        chain = _chain(c.ranks_per_host, nbytes, c.intra_latency_s, c.intra_bytes_s)
        return Phases(c.call_s + 2 * chain if c.size > 1 else 0.0)
    bytes_s = c.host_bytes_s(c.nics)
    if c.ranks_per_host > 1:
        bytes_s = min(bytes_s, c.intra_bytes_s)
    depth = math.ceil(math.log2(c.hosts))
    steps = (c.ranks_per_host - 1) * c.intra_latency_s + depth * c.inter_latency_s
    times = 1 if c.hosts == 2 else 2
    return Phases(0.0, c.call_s + 2 * steps + times * nbytes / (0.92 * bytes_s))


def pure_nccl(cluster: Cluster, nbytes: float) -> Phases:
    """NCCL over all ranks: the better of ring and tree, between which it chooses."""
    ring, other = flat(cluster, nbytes), tree(cluster, nbytes)
    return min(ring, other, key=lambda phases: phases.pipelined_s(1))


def hierarchical(cluster: Cluster, nbytes: float) -> Phases:
    """Reduce in the host, ring of the leaders, broadcast in the host.

    3L + 2[(G-1) a_i + M/b] + 2(N-1) (a_x + M/(N B(1))). Source: ChainerMN 5's
    communicator of this name; through common memory the leader finds the sum in place.
    """
    c = cluster
    if c.shared_memory:
        intra = 2 * _in_host(c, nbytes)
    else:
        latency, bytes_s = c.intra_latency_s, c.intra_bytes_s
        intra = 2 * _chain(c.ranks_per_host, nbytes, latency, bytes_s)
    calls = 2 * c.call_s if c.ranks_per_host > 1 else 0.0
    return Phases(calls + intra, _between_hosts(c, nbytes, 1))


def two_dimensional(cluster: Cluster, nbytes: float) -> Phases:
    """Reduce-scatter in the host, rings of equal local ranks, all-gather in the host.

    3L + 2(G-1) (a_i + M/(G b)) + 2(N-1) (a_x + (M/G) / (N B(G)/G)). Source: ChainerMN
    5's communicator of this name.
    """
    c = cluster
    calls = 2 * c.call_s if c.ranks_per_host > 1 else 0.0
    part = nbytes / c.ranks_per_host
    return Phases(
        calls + 2 * _in_host(c, nbytes), _between_hosts(c, part, c.ranks_per_host)
    )


def multi_ring(
    cluster: Cluster, nbytes: float, dims: Sequence[int] | None = None
) -> Phases:
    """Reduce-scatter along dims[0], dims[1], ... on ever smaller parts, and back.

    Sum over i of 2[L + (p_i - 1) (a_i + M_i/(p_i b_i))], M_i = M / (p_0 ... p_{i-1});
    b in the host, B(G)/G between hosts. A dimension that crosses the border of the
    hosts is a ring with links of both kinds.

    Args:
        cluster: where.
        nbytes: of the message.
        dims: factors of P, dimension 0 fastest; ``None``: (G, N).

    Raises:
        ValueError: the product is not P, or a dimension has other parts of hosts.

    Source: BlueConnect (Cho et al., MLSys 2019) and PowerAI DDL (arXiv 1708.02188).
    """
    c = cluster
    dims = (c.ranks_per_host, c.hosts) if dims is None else tuple(dims)
    if math.prod(dims) != c.size:
        raise ValueError(f"dims {dims}: their product is not {c.size}, all ranks")
    part, stride, intra, inter = nbytes, 1, 0.0, 0.0
    for p in dims:
        if p > 1:
            n_hosts = _hosts_of_ring(c, stride, p)
            seconds = 2 * (c.call_s + _ring_in_grid(c, part, stride, p, n_hosts))
            if n_hosts == 1:
                intra += seconds
            else:
                inter += seconds
        part, stride = part / p, stride * p
    return Phases(intra, inter)


def _hosts_of_ring(cluster: Cluster, stride: int, p: int) -> int:
    """Return over how many hosts a ring of ``p`` ranks, ``stride`` apart, extends."""
    g = cluster.ranks_per_host
    if stride % g == 0:
        return p
    if g % (stride * p) == 0:
        return 1
    if (stride * p) % g == 0 and g % stride == 0:
        return stride * p // g
    raise ValueError(
        f"a dimension of {p} ranks, {stride} apart, does not fit hosts of {g} ranks"
    )


def _ring_in_grid(
    cluster: Cluster, nbytes: float, stride: int, p: int, n_hosts: int
) -> float:
    c = cluster
    if n_hosts == 1:
        if c.shared_memory:
            return c.intra_latency_s + nbytes / c.shared_bytes_s
        return _ring(p, nbytes, c.intra_latency_s, c.intra_bytes_s)
    flows = min(stride, c.ranks_per_host)
    bytes_s = c.host_bytes_s(flows) / flows
    if n_hosts < p:
        bytes_s = min(bytes_s, c.intra_bytes_s)
    latency = (p - n_hosts) * c.intra_latency_s + (n_hosts - 1) * c.inter_latency_s
    return latency + (p - 1) / p * nbytes / bytes_s


def non_cuda_aware(cluster: Cluster, nbytes: float) -> Phases:
    """``hierarchical``, and two copies of M on the leaders, to the host and back.

    Two, not the 3 + 1/N of ChainerMN's communicator: the exchange leaves the whole sum
    in host memory.
    """
    phases = hierarchical(cluster, nbytes)
    if cluster.hosts == 1:
        return phases
    return replace(
        phases, inter_s=phases.inter_s + 2 * nbytes / cluster.host_copy_bytes_s
    )


def single_node(cluster: Cluster, nbytes: float) -> Phases:
    """``flat`` on one host.

    Raises:
        ValueError: several hosts.
    """
    if cluster.hosts > 1:
        raise ValueError(f"single_node works on one host, not on {cluster.hosts}")
    return flat(cluster, nbytes)


_BY_NAME: dict[str, Callable[[Cluster, float], Phases]] = {
    "flat": flat,
    "hierarchical": hierarchical,
    "multi_ring": multi_ring,
    "non_cuda_aware": non_cuda_aware,
    "pure_nccl": pure_nccl,
    "single_node": single_node,
    "two_dimensional": two_dimensional,
}

#: The communicators that there is a formula for.
MODELLED = tuple(sorted([*_BY_NAME, "naive"]))


def allreduce_s(
    name: str,
    cluster: Cluster,
    nbytes: float,
    *,
    dims: Sequence[int] | None = None,
    n_pieces: int = 1,
    n_arrays: int = 1,
) -> float:
    """Return the seconds that reducing ``nbytes`` takes.

    Args:
        name: of a communicator; one of :data:`MODELLED`.
        cluster: where.
        nbytes: of all arrays, as they travel.
        dims: of ``multi_ring``.
        n_pieces: buckets, or chunks of all buckets, into which the bytes are cut.
        n_arrays: in how many arrays the bytes are; only ``naive`` cares, which sends
            each by itself: flat(M) + (n_arrays - 1) flat(0).

    Raises:
        ValueError: no formula of that name, or it does not work on this cluster.
    """
    if name == "naive":
        first = flat(cluster, nbytes).pipelined_s(1)
        return first + (n_arrays - 1) * flat(cluster, 0.0).pipelined_s(1)
    if name not in _BY_NAME:
        raise ValueError(f"no formula for {name!r}; there are {', '.join(MODELLED)}")
    if dims is not None and name == "multi_ring":
        phases = multi_ring(cluster, nbytes / n_pieces, dims)
    else:
        phases = _BY_NAME[name](cluster, nbytes / n_pieces)
    return phases.pipelined_s(n_pieces)
