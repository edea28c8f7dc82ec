"""The gradient in flight in Chainer's snapshots."""

from __future__ import annotations

import math

import chainer
import numpy as np

from chainermn_ng.optimizers.double_buffering_average import Averages


def save_averages(serializer: chainer.Serializer, averages: Averages | None) -> None:
    """Write what is in flight beside the optimizer's own state.

    Args:
        serializer: of the optimizer.
        averages: arrays that have arrived; ``None`` if nothing is in flight.
    """
    serializer("n_in_flight", 0 if averages is None else 1)
    if averages is None:
        return
    branch = serializer["in_flight"]
    # Some formats know neither text nor None.
    paths = "\n".join(averages.arrays).encode()
    scales = [averages.loss_scales[name] for name in averages.arrays]
    branch("paths", np.frombuffer(paths, np.uint8))
    branch("loss_scales", np.array([math.nan if s is None else s for s in scales], "d"))
    for name, array in averages.arrays.items():
        branch[name]("grad", array)


def holds_averages(serializer: chainer.Deserializer) -> bool:
    """Tell whether a snapshot was taken with a gradient in flight."""
    try:
        return bool(serializer("n_in_flight", 0))
    except KeyError:
        # Saved by an optimizer without double buffering.
        return False


def load_averages(serializer: chainer.Deserializer) -> Averages | None:
    """Read what :func:`save_averages` wrote; ``None`` if nothing was in flight.

    The arrays are NumPy's. The model need not have been loaded.
    """
    if not holds_averages(serializer):
        return None
    branch = serializer["in_flight"]
    text = np.asarray(branch("paths", None), np.uint8).tobytes().decode()
    names = text.split("\n") if text else []
    scales = np.asarray(branch("loss_scales", None)).tolist()
    return Averages(
        {name: np.array(branch[name]("grad", None)) for name in names},
        {
            name: None if math.isnan(scale) else scale
            for name, scale in zip(names, scales, strict=True)
        },
    )
