"""Whether this machine has an NVIDIA GPU, asked without any package."""

from __future__ import annotations

import ctypes

DRIVER = "libcuda.so.1"

_NO_DEVICE = 100


def why_no_gpu(driver: str = DRIVER) -> str | None:
    """Return why CUDA programs cannot run here; ``None`` where they can.

    Args:
        driver: name or path of the driver's library.
    """
    try:
        cuda = ctypes.CDLL(driver)
    except OSError as error:
        return f"there is no NVIDIA driver ({error})"
    code = cuda.cuInit(0)
    count = ctypes.c_int(0)
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, _NO_DEVICE):
        return f"the NVIDIA driver does not start (CUDA error {code})"
    return None if count.value else "the NVIDIA driver finds no GPU"
