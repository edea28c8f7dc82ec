"""What the cost model takes: communicator, factors, pieces; steps and efficiency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from communicators.cost_model import Cluster, allreduce_s

#: Numbers of pieces that are tried.
_PIECES = tuple(2**i for i in range(9))
#: The smallest piece: below it, splitting a message costs more than it gains.
_MIN_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Choice:
    """A communicator with its options, and what the model says of it.

    Attributes:
        name: of the communicator.
        seconds: of one all-reduce.
        dims: of ``multi_ring``; else ``None``.
        n_pieces: in how many pieces the message travels.
    """

    name: str
    seconds: float
    dims: tuple[int, ...] | None = None
    n_pieces: int = 1

    def piece_bytes(self, nbytes: float) -> int:
        """Return the bytes of one piece of a message of ``nbytes``."""
        return math.ceil(nbytes / self.n_pieces)


def factorizations(n: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``n`` as a non-decreasing product of factors >= 2."""
    if n == 1:
        yield ()
        return
    for p in range(least, math.isqrt(n) + 1):
        if n % p == 0:
            for rest in factorizations(n // p, p):
                yield (p, *rest)
    if n >= least:
        yield (n,)


def best_dims(cluster: Cluster, nbytes: float) -> tuple[int, ...]:
    """Return the factors for ``multi_ring`` that cost least: (ranks a host, ...).

    Between hosts all factorizations move the same 2(1 - 1/N) M/G bytes a rank, so only
    latency and calls decide: factors of 2 unless calls cost more than 0.7 latencies.
    """
    options = [(cluster.ranks_per_host, *f) for f in factorizations(cluster.hosts)]
    return min(
        options, key=lambda dims: allreduce_s("multi_ring", cluster, nbytes, dims=dims)
    )


def best_choice(
    name: str,
    cluster: Cluster,
    nbytes: float,
    *,
    n_arrays: int = 1,
    bucket_bytes: int | None = None,
) -> Choice:
    """Return how a communicator is used best.

    Args:
        name: of the communicator.
        cluster: where.
        nbytes: of the message.
        n_arrays: in how many arrays the bytes are.
        bucket_bytes: of a bucket, if that is given; by default the number of pieces
            with the least time, none below 256 KiB.

    Raises:
        ValueError: see :func:`communicators.cost_model.allreduce_s`.
    """
    if bucket_bytes is not None:
        pieces: tuple[int, ...] = (max(1, math.ceil(nbytes / bucket_bytes)),)
    else:
        most = max(1, nbytes // _MIN_PIECE_BYTES)
        pieces = tuple(n for n in _PIECES if n <= most)
    choices = []
    for n in pieces:
        dims = best_dims(cluster, nbytes / n) if name == "multi_ring" else None
        seconds = allreduce_s(
            name, cluster, nbytes, dims=dims, n_pieces=n, n_arrays=n_arrays
        )
        choices.append(Choice(name, seconds, dims, n))
    return min(choices, key=lambda choice: choice.seconds)


@dataclass(frozen=True)
class Training:
    """What a step is made of besides the network.

    Attributes:
        compute_s: seconds of one step on one rank, without communication.
        pack_s: seconds for packing and unpacking the gradients.
        overlap: part of the backward pass that communication can go on beside, 0 to 1.
        jitter: relative standard deviation of ``compute_s``; all wait for the slowest.
        backward_share: part of the compute time that is backward; twice the forward
            pass, as it computes gradients by inputs and by weights.
    """

    compute_s: float
    pack_s: float = 0.0
    overlap: float = 0.0
    jitter: float = 0.0
    backward_share: float = 2 / 3

    def __post_init__(self) -> None:
        if not 0 < self.compute_s < math.inf:
            raise ValueError(f"compute_s {self.compute_s!r}: expected more than 0 s")
        for name in ("pack_s", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected 0 or more")
        for name in ("overlap", "backward_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected 0 to 1")

    def step_s(self, allreduce_seconds: float, n_ranks: int) -> float:
        """Return the seconds of a step.

        compute (1 + jitter sqrt(2 ln P)) + pack + max(0, all-reduce - overlap *
        backward). The root is about the largest of P normal variables.
        """
        slowest = math.sqrt(2 * math.log(n_ranks))
        hidden = self.overlap * self.backward_share * self.compute_s
        exposed = max(0.0, allreduce_seconds - hidden)
        return self.compute_s * (1 + self.jitter * slowest) + self.pack_s + exposed

    def efficiency(self, allreduce_seconds: float, n_ranks: int) -> float:
        """Return the compute time's part of a step: speed-up divided by ranks."""
        return self.compute_s / self.step_s(allreduce_seconds, n_ranks)
