"""CuPy for programs that run on a real GPU and, to be tested, on its lazy stand-in."""

from __future__ import annotations

import pathlib
from types import ModuleType

#: Says "the real CuPy" where the path of the pack kernels for the host is expected.
REAL = "cuda"


def load_cupy(kernels: str, device_id: int = 0) -> ModuleType:
    """Return CuPy with its current device chosen, or the stand-in in its place.

    Args:
        kernels: :data:`REAL`, or the library of the pack kernels that
            :func:`host_kernels.library.build` makes: with it the stand-in is installed.
        device_id: number of the device.
    """
    if kernels != REAL:
        from host_kernels.library import HostLauncher

        from helpers import lazy_cupy

        launcher = HostLauncher(pathlib.Path(kernels))
        return lazy_cupy.install(device_id, lambda code: launcher)
    import cupy

    cupy.cuda.Device(device_id).use()
    return cupy
