"""A device for each rank."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.backends import cuda

from chainermn_ng import cpu_fallback
from chainermn_ng.communicators.factory import engine_of
from communicators import UnavailableError

_INSTALL = (
    "pip install 'chainermn-ng[cuda13]', or 'chainermn-ng[cuda12]' for CUDA 12, brings "
    "CuPy and CUDA's libraries"
)


def choose_device(comm: Any, gpu: bool = True) -> chainer.backend.Device:
    """Make a GPU of its own each rank's current device. Collective.

    To be called before the first array is made: NCCL needs a device for each rank, and
    the rank whose number on its host is ``k`` gets GPU ``k``.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py.
        gpu: the same on all ranks. Without it the device is the CPU, and nothing is
            changed; nor on machines without GPUs where
            :mod:`chainermn_ng.cpu_fallback` is asked for.

    Returns:
        chainer.backend.Device: for ``model.to_device`` and the updater.

    Raises:
        UnavailableError: a rank has no GPU; on all ranks, with the reason.
        MismatchError: ``gpu`` differs between ranks.
    """
    gpu = gpu and not cpu_fallback.is_active()
    with engine_of(comm) as engine:
        number = engine.world_intra_rank
        reason = why_no_gpu(number) if gpu else None
        error = None if reason is None else UnavailableError(reason)
        engine.agree("choose_device", f"gpu={bool(gpu)}", error=error)
    device = chainer.get_device(f"@cupy:{number}" if gpu else "@numpy")
    if gpu:
        device.use()
    return device


def why_no_gpu(number: int) -> str | None:
    """Return why this process cannot use the GPU of a number; ``None`` if it can."""
    if not cuda.available:
        reason = " ".join(str(cuda._resolution_error).split())
        return f"no GPU: CuPy cannot be imported ({reason}); {_INSTALL}"
    runtime = cuda.cupy.cuda.runtime
    try:
        n_devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    if number < n_devices:
        return None
    return (
        f"this host's rank {number} (they count from 0) has no GPU of its own: there "
        f"are {n_devices}; start no more ranks on a host than it has GPUs"
    )


def cupy_random() -> Any:
    """Return ``cupy.random`` where there is a GPU; CuPy alone has no generators."""
    return cuda.cupy.random if why_no_gpu(0) is None else None
