"""ChainerMN's helper for tests on several kinds of devices."""

from __future__ import annotations

import chainer

__all__ = ["get_device"]


def get_device(
    device_id: int | None = None, use_chainerx: bool = False
) -> chainer.backend.Device:
    """Return one of Chainer's devices by its number.

    Args:
        device_id: number of a GPU; ``None`` for the CPU.
        use_chainerx: a device of ChainerX instead of CuPy or NumPy.

    Raises:
        RuntimeError: Chainer has no such device here.
    """
    if use_chainerx:
        return chainer.get_device(
            "native:0" if device_id is None else f"cuda:{device_id}"
        )
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
