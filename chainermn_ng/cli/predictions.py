"""What the cost model says of a training on a cluster of any number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from communicators.cost_model import Cluster
from communicators.cost_search import Choice, Training, best_choice

#: Buckets that a message is cut into at least if it is to travel beside the backward
#: pass: the first cannot leave before its last gradient is there.
_PIECES_TO_OVERLAP = 4
_ON_CPU = ("flat", "hierarchical", "two_dimensional", "multi_ring", "naive")
_ON_GPU = ("pure_nccl", *_ON_CPU, "non_cuda_aware")


@dataclass(frozen=True)
class Load:
    """What is reduced at every step.

    Attributes:
        name: of a network, or the number of bytes in words.
        nbytes: on the wire.
        n_arrays: number of arrays.
        bucket_bytes: of a bucket; ``None``: what takes least time.
    """

    name: str
    nbytes: float
    n_arrays: int
    bucket_bytes: int | None = None


@dataclass(frozen=True)
class Prediction:
    """One communicator on one number of ranks.

    Attributes:
        hosts: their number.
        ranks_per_host: on each.
        choice: the communicator, its options, and the seconds of one all-reduce.
        step_s: seconds of a step; ``None`` where the compute time is not known.
        efficiency: speed-up by number of ranks; ``None`` likewise.
    """

    hosts: int
    ranks_per_host: int
    choice: Choice
    step_s: float | None
    efficiency: float | None

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host


def names_for(device: str) -> tuple[str, ...]:
    """Return the communicators that arrays on ``"gpu"`` or ``"cpu"`` can use."""
    return _ON_GPU if device == "gpu" else _ON_CPU


def shapes_up_to(hosts: int, ranks_per_host: int) -> Iterator[tuple[int, int]]:
    """Yield (hosts, ranks a host): one host filling up, then more and more full ones.

    Powers of two, and the whole cluster.
    """
    for n in _powers_up_to(ranks_per_host):
        yield 1, n
    for n in _powers_up_to(hosts):
        if n > 1:
            yield n, ranks_per_host


def _powers_up_to(n: int) -> Iterator[int]:
    power = 1
    while power < n:
        yield power
        power *= 2
    yield n


def predict(
    cluster: Cluster, names: Sequence[str], load: Load, training: Training | None
) -> list[Prediction]:
    """Return a prediction for every communicator, the best one first.

    Args:
        cluster: where.
        names: of communicators.
        load: what is reduced.
        training: what a step is besides; ``None``: all-reduce times only.
    """
    found = []
    for name in names:
        choice = _choose(name, cluster, load, training)
        step_s = efficiency = None
        if training is not None:
            step_s = training.step_s(choice.seconds, cluster.size)
            efficiency = training.efficiency(choice.seconds, cluster.size)
        found.append(
            Prediction(
                cluster.hosts, cluster.ranks_per_host, choice, step_s, efficiency
            )
        )
    # Where everything hides behind the backward pass the all-reduce still decides.
    return sorted(found, key=lambda p: (p.step_s or 0.0, p.choice.seconds))


def _choose(
    name: str, cluster: Cluster, load: Load, training: Training | None
) -> Choice:
    bucket_bytes = load.bucket_bytes
    choice = best_choice(
        name, cluster, load.nbytes, n_arrays=load.n_arrays, bucket_bytes=bucket_bytes
    )
    overlaps = training is not None and training.overlap > 0
    if bucket_bytes is None and overlaps and choice.n_pieces < _PIECES_TO_OVERLAP:
        return best_choice(
            name,
            cluster,
            load.nbytes,
            n_arrays=load.n_arrays,
            bucket_bytes=max(1, int(load.nbytes // _PIECES_TO_OVERLAP) + 1),
        )
    return choice


def predict_all(
    cluster: Cluster, names: Sequence[str], load: Load, training: Training | None
) -> list[list[Prediction]]:
    """Return :func:`predict` for one rank up to the whole cluster."""
    return [
        predict(
            dataclasses.replace(cluster, hosts=hosts, ranks_per_host=ranks_per_host),
            names,
            load,
            training,
        )
        for hosts, ranks_per_host in shapes_up_to(cluster.hosts, cluster.ranks_per_host)
    ]


def script_line(prediction: Prediction, load: Load, wire_dtype: str | None) -> str:
    """Return the line of Python that makes the communicator of a prediction."""
    choice = prediction.choice
    arguments = [repr(choice.name).replace("'", '"')]
    if choice.dims is not None:
        # Dimensions of one rank say nothing.
        dims = tuple(p for p in choice.dims if p > 1)
        arguments.append(f"dims={dims or (1,)}")
    if choice.name != "naive":
        kib = -(-choice.piece_bytes(load.nbytes) // 1024)
        arguments.append(f"bucket_bytes={kib} * 1024")
    if wire_dtype is not None:
        arguments.append(f'allreduce_grad_dtype="{wire_dtype}"')
    return f"comm = chainermn_ng.create_communicator({', '.join(arguments)})"
