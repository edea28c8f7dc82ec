"""Choosing the device for a call's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from communicators.devices.device import Device
from communicators.devices.host import (
    EmulatedDevice,
    HostDevice,
    nccl_takes_host_memory,
)
from communicators.devices.kinds import CPU, GPU, common_kind, kind_of
from communicators.errors import UnavailableError


class DeviceChoice:
    """The devices of one communicator, each made at its first use.

    Args:
        device_types: the kinds of arrays that the communicator takes.
        kept_bytes: buffers in host memory of up to this size are used again.
        n_kept: how many of them.
    """

    def __init__(
        self, device_types: Sequence[str], kept_bytes: int, n_kept: int
    ) -> None:
        # A communicator that only knows NumPy arrays cannot be given NCCL's buffers.
        emulated = nccl_takes_host_memory() and GPU in device_types
        cls = EmulatedDevice if emulated else HostDevice
        self.host: Device = cls(kept_bytes, n_kept)
        self._gpu: Any = None

    def for_arrays(self, arrays: Sequence[Any], operation: str) -> Device:
        """Return where the arrays live. Makes nothing that other ranks wait for.

        Args:
            arrays: NumPy arrays, CuPy arrays, or specs of missing ones.
            operation: for errors.

        Raises:
            TypeError: both kinds of arrays.
            ValueError: arrays on several GPUs, or on another than before.
            UnavailableError: GPU arrays, and CuPy or its GPU is not there.
        """
        kinds = {
            CPU
            if type(a) is np.ndarray
            else getattr(a, "kind", None) or kind_of(a) or CPU
            for a in arrays
        }
        return self.of_kind(common_kind(kinds, operation), operation, arrays)

    def of_kind(self, kind: str, operation: str, arrays: Sequence[Any] = ()) -> Device:
        """Return the device of a kind: for a GPU the arrays', or the current one.

        Raises:
            ValueError, UnavailableError: as in :meth:`for_arrays`.
        """
        if kind == CPU:
            return self.host
        ids = sorted({int(a.device.id) for a in arrays if kind_of(a) == GPU})
        if len(ids) > 1:
            names = ", ".join(f"cuda:{i}" for i in ids)
            raise ValueError(f"{operation}: the arrays of one call lie on {names}")
        if self._gpu is None:
            self._gpu = _cuda_device(ids[0] if ids else None, operation)
        elif ids and ids[0] != self._gpu.device_id:
            raise ValueError(
                f"{operation}: an array lies on cuda:{ids[0]}, but this communicator "
                f"was first used with {self._gpu}; a rank uses one device, chosen by "
                "chainermn_ng.choose_device(comm), or by "
                "cupy.cuda.Device(comm.world_intra_rank).use(), before its arrays are "
                "made"
            )
        device: Device = self._gpu
        return device


def _cuda_device(device_id: int | None, operation: str) -> Any:
    try:
        import cupy

        from communicators.devices.cuda import CudaDevice

        return CudaDevice(
            cupy.cuda.runtime.getDevice() if device_id is None else device_id
        )
    except Exception as error:
        # Whatever CuPy raises without a driver, a device or its libraries.
        raise UnavailableError(
            f"{operation}: a GPU is needed on this rank too, and cannot be used "
            f"({type(error).__name__}: {error})"
        ) from error
