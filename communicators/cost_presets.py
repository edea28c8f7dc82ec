"""Clusters by name, for the cost model: known machines and common networks."""

from __future__ import annotations

from dataclasses import dataclass

from communicators.cost_model import Cluster


@dataclass(frozen=True)
class Preset:
    """A cluster, what it is, and where its constants come from.

    Attributes:
        cluster: its constants.
        device: ``"gpu"`` or ``"cpu"``: where the arrays are.
        title: in a few words.
        source: of the constants.
    """

    cluster: Cluster
    device: str
    title: str
    source: str


#: By name. Hosts and ranks are those of the machine and can be changed.
PRESETS = {
    "chainermn-2017": Preset(
        Cluster(32, 4, 6.4e9, 4.1e9, 1, intra_latency_s=10e-6, inter_latency_s=20e-6),
        "gpu",
        "32 hosts x 4 Titan X on PCIe, one FDR InfiniBand card",
        "bandwidths from the times in chainer/chainermn#93; latencies assumed",
    ),
    "ddl-2017": Preset(
        Cluster(64, 4, 30e9, 10.6e9, 2),
        "gpu",
        "64 hosts x 4 P100 with NVLink, two EDR InfiniBand cards",
        "nominal rates less a tenth to a quarter; arXiv 1708.02188 for the shape",
    ),
    "mn1-2017": Preset(
        Cluster(128, 8, 8e9, 5.4e9, 2, intra_latency_s=6e-6),
        "gpu",
        "128 hosts x 8 P100 on PCIe, two FDR InfiniBand cards",
        "nominal rates less a fifth; arXiv 1711.04325 for the shape",
    ),
    "h100": Preset(
        Cluster(16, 8, 360e9, 45e9, 8, intra_latency_s=3.5e-6),
        "gpu",
        "16 hosts x 8 H100 with NVSwitch, eight NDR InfiniBand cards",
        "nominal rates less a tenth to a fifth; NCCL's tuning.cc for the latencies",
    ),
    "cpu-10gbe": Preset(
        Cluster(
            4,
            4,
            6e9,
            1.17e9,
            intra_latency_s=2e-6,
            inter_latency_s=40e-6,
            shared_memory=True,
            memory_bytes_s=40e9,
            is_striped=False,
        ),
        "cpu",
        "4 hosts x 4 CPU ranks, 10 Gbit/s Ethernet",
        "94% of the wire by TCP; memory and latencies assumed",
    ),
    "cpu-1gbe": Preset(
        Cluster(
            2,
            4,
            6e9,
            0.117e9,
            intra_latency_s=2e-6,
            inter_latency_s=50e-6,
            shared_memory=True,
            memory_bytes_s=20e9,
            is_striped=False,
        ),
        "cpu",
        "2 hosts x 4 CPU ranks, 1 Gbit/s Ethernet",
        "94% of the wire by TCP; memory and latencies assumed",
    ),
}
