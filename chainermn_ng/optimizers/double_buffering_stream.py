"""Device work of the background thread, in order with that of the main thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from chainer.backends import cuda


class DeviceOrder:
    """What the device must have finished before the background thread begins.

    Made by the thread that has computed the arrays, used by the one in the background.
    Does nothing for NumPy arrays.

    Args:
        arrays: of NumPy, or of CuPy on one device.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        devices = [a.device for a in arrays if isinstance(a, cuda.ndarray)]
        self._device = devices[0] if devices else None
        if self._device is not None:
            with self._device:
                self._computed = cuda.Event(disable_timing=True)
                self._computed.record()  # on the current stream

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Work on the right device and on a stream beside that of the main thread.

        At the end of the block its device work is done: no other stream needs to wait.
        """
        if self._device is None:
            yield
            return
        with self._device, _side_stream(self._device.id) as stream:
            stream.wait_event(self._computed)
            yield
            stream.synchronize()


@functools.cache
def _side_stream(_device_id: int) -> Any:
    # Non-blocking: the default stream, on which Chainer computes, would wait for it.
    return cuda.Stream(non_blocking=True)
