"""Published times and efficiencies of data-parallel training, with their sources.

Each cluster holds only what its source says, or what is known of the hardware; what was
fitted, and on which figures, stands beside it. Figures that the model misses by more
than a tenth are in ``docs/source/planning.md``, not here.
"""

from dataclasses import dataclass, replace

from communicators.cost_model import Cluster, allreduce_s
from communicators.cost_search import Training, best_choice

#: Gradients of ResNet-50 and ResNet-101 in float32, bytes.
RESNET50 = 102_228_384
RESNET101 = 178.2e6

#: Packing and unpacking 161 arrays on a GPU of 2017: what one GPU needs for
#: ``single_node`` in the logs of github.com/mitmul/chainermn-on-azure.
PACK_S = 3.1e-3


@dataclass(frozen=True)
class Figure:
    """One published number, and what the model says in its place."""

    label: str
    published: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.published - 1


# -- A. Times of one all-reduce in ChainerMN 1, github.com/chainer/chainermn/pull/93
# (2017-06-16): hosts of 4 GPUs on PCIe, one FDR InfiniBand card. Fitted on the two rows
# of `hierarchical` (0.0352 s on 1 host, 0.0831 s on 32): bandwidth in the host and of
# the card.

_HIERARCHICAL_1, _HIERARCHICAL_32 = 0.0352, 0.0831
CHAINERMN_2017 = Cluster(
    hosts=1,
    ranks_per_host=4,
    intra_bytes_s=2 * RESNET50 / (_HIERARCHICAL_1 - PACK_S),
    inter_bytes_s=2 * 31 / 32 * RESNET50 / (_HIERARCHICAL_32 - _HIERARCHICAL_1),
    intra_latency_s=10e-6,
    inter_latency_s=20e-6,
)


def _on(cluster: Cluster, hosts: int, ranks_per_host: int = 4) -> Cluster:
    return replace(cluster, hosts=hosts, ranks_per_host=ranks_per_host)


def times_of_chainermn_1() -> list[Figure]:
    """`two_dimensional`, which nothing was fitted on."""
    return [
        Figure(
            f"two_dimensional {hosts}x4",
            seconds,
            PACK_S
            + allreduce_s("two_dimensional", _on(CHAINERMN_2017, hosts), RESNET50),
        )
        for hosts, seconds in ((1, 0.0294), (32, 0.0813))
    ]


# -- B. Speed-up of ResNet-50, 32 images a GPU, on 32 hosts of 4 Titan X with FDR
# InfiniBand: chainer.org, blog of 2017-02-08 (read off its plot, which is good for 1%),
# and the 90% on 128 GPUs of arXiv 1710.11351's abstract. Nothing fitted beyond A.

_SPEEDUPS = {2: 1.86, 4: 3.54, 8: 6.96, 16: 13.15, 32: 26.09, 64: 49.53, 128: 98.77}
_TITAN_X = Training(compute_s=32 / 82.1, pack_s=PACK_S)


def efficiencies_of_chainermn() -> list[Figure]:
    """`hierarchical`, the default of the time."""

    def model(n_gpus: int) -> float:
        cluster = _on(CHAINERMN_2017, max(1, n_gpus // 4), min(4, n_gpus))
        seconds = allreduce_s("hierarchical", cluster, RESNET50)
        return _TITAN_X.efficiency(seconds, n_gpus)

    return [
        *(
            Figure(f"blog of 2017-02-08, {n} GPUs", speedup / n, model(n))
            for n, speedup in _SPEEDUPS.items()
        ),
        Figure("arXiv 1710.11351, 128 GPUs", 0.90, model(128)),
    ]


# -- C. PowerAI DDL's 95% on 64 hosts of 4 P100, ResNet-50, 32 images a GPU (IBM's
# announcement of 2017-08-08; arXiv 1708.02188: 90 epochs in 50 minutes). Not fitted:
# NVLink ring 30 GB/s, EDR 10.6 GB/s. How many EDR ports a host had is not told: one and
# two must both do. The compute time follows from the 50 minutes and the 95%.


def efficiencies_of_ddl() -> list[Figure]:
    """`multi_ring`, whole and in pieces."""
    step_s = 50 * 60 / (90 * 1281167 / (256 * 32))
    training = Training(compute_s=0.95 * step_s)
    figures = []
    for ports in (1, 2):
        cluster = Cluster(64, 4, 30e9, 10.6e9, ports)
        for dims in ((4, 64), (4, 8, 8)):
            seconds = allreduce_s("multi_ring", cluster, RESNET50, dims=dims)
            label = f"{dims}, {ports} EDR ports"
            figures.append(Figure(label, 0.95, training.efficiency(seconds, 256)))
        seconds = best_choice("multi_ring", cluster, RESNET50).seconds
        label = f"in pieces, {ports} EDR ports"
        figures.append(Figure(label, 0.95, training.efficiency(seconds, 256)))
    return figures


# -- D. ResNet-101, 64 images a GPU, images/s on POWER9 hosts of 4 V100 with two EDR
# ports: github.com/horovod/horovod/pull/323. Nothing fitted: NVLink ring 60 GB/s.

_BY_DDL = {4: 847.75, 8: 1680.50, 16: 3257.20}
_DDL_ONE_GPU = 214.37
_NCCL_ONE_GPU, _NCCL_16_GPUS = 213.84, 3210.0


def efficiencies_of_horovod() -> list[Figure]:
    """DDL's rings below Horovod, and NCCL's flat ring."""

    def cluster(n_gpus: int) -> Cluster:
        return Cluster(n_gpus // 4, 4, 60e9, 10.6e9, nics=2)

    figures = []
    training = Training(compute_s=64 / _DDL_ONE_GPU)
    for n_gpus, images_s in _BY_DDL.items():
        seconds = allreduce_s("multi_ring", cluster(n_gpus), RESNET101)
        model = training.efficiency(seconds, n_gpus)
        figures.append(
            Figure(f"DDL, {n_gpus} GPUs", images_s / n_gpus / _DDL_ONE_GPU, model)
        )
    training = Training(compute_s=64 / _NCCL_ONE_GPU)
    seconds = allreduce_s("flat", cluster(16), RESNET101)
    published = _NCCL_16_GPUS / 16 / _NCCL_ONE_GPU
    figures.append(Figure("NCCL, 16 GPUs", published, training.efficiency(seconds, 16)))
    return figures


# -- E. Flat ring, 1.6 GB, 8 V100: github.com/NVIDIA/nccl/issues/569. The card's
# bandwidth fitted on 8 hosts x 1 GPU (0.363 s).


def times_of_nccl_569() -> list[Figure]:
    """4 hosts x 2 GPUs, a card a GPU."""
    card = 2 * 7 / 8 * 1.6e9 / 0.363
    cluster = Cluster(4, 2, 120e9, card, nics=2, intra_latency_s=4e-6)
    return [Figure("4x2", 0.173, allreduce_s("flat", cluster, 1.6e9))]
