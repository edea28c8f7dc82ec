"""The order of device work between two threads, noted by a stand-in for CUDA.

What it does on a device shows on a device only; here the calls and their order count.
"""

import contextlib
import threading

import numpy as np
import pytest

from chainermn_ng.optimizers import double_buffering_stream
from chainermn_ng.optimizers.double_buffering_stream import DeviceOrder


class Array:
    def __init__(self, device):
        self.device = device


class Device:
    def __init__(self, cuda, number):
        self.id = number
        self._cuda = cuda

    def __enter__(self):
        self._cuda.note(f"device {self.id}")

    def __exit__(self, *exc_info):
        self._cuda.note("device before")


class Cuda:
    """Notes who calls what; has the names that the module takes from CuPy."""

    ndarray = Array

    def __init__(self):
        self.calls = []
        cuda = self

        class Event:
            def __init__(self, disable_timing):
                assert disable_timing

            def record(self):
                cuda.note("record on the current stream")

        class Stream:
            def __init__(self, non_blocking):
                cuda.note(f"stream, non_blocking={non_blocking}")

            def __enter__(self):
                cuda.note("stream is current")
                return self

            def __exit__(self, *exc_info):
                cuda.note("stream before")

            def wait_event(self, event):
                assert isinstance(event, Event)
                cuda.note("wait for the event")

            def synchronize(self):
                cuda.note("synchronize")

        self.Event, self.Stream = Event, Stream

    def note(self, what):
        is_main = threading.current_thread() is threading.main_thread()
        self.calls.append(("main" if is_main else "background", what))


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(double_buffering_stream, "cuda", cuda)
    double_buffering_stream._side_stream.cache_clear()
    yield cuda
    double_buffering_stream._side_stream.cache_clear()


def work_in_a_thread(cuda, order):
    def work():
        with order.on_side_stream():
            cuda.note("all-reduce")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=20)


def test_the_side_stream_waits_for_the_main_one_and_is_waited_for(cuda):
    arrays = [None, Array(Device(cuda, 1)), Array(Device(cuda, 1))]
    for is_first in (True, False):
        cuda.calls.clear()
        work_in_a_thread(cuda, DeviceOrder(arrays))
        made = [("background", "stream, non_blocking=True")] if is_first else []
        assert cuda.calls == [
            ("main", "device 1"),
            ("main", "record on the current stream"),
            ("main", "device before"),
            ("background", "device 1"),
            *made,
            ("background", "stream is current"),
            ("background", "wait for the event"),
            ("background", "all-reduce"),
            ("background", "synchronize"),
            ("background", "stream before"),
            ("background", "device before"),
        ]


def test_nothing_happens_for_host_arrays(cuda):
    work_in_a_thread(cuda, DeviceOrder([None, np.zeros(2)]))
    assert cuda.calls == [("background", "all-reduce")]


def test_the_stream_and_the_device_are_left_after_an_error(cuda):
    order = DeviceOrder([Array(Device(cuda, 0))])
    with contextlib.suppress(KeyError), order.on_side_stream():
        raise KeyError("broken")
    assert [what for _, what in cuda.calls[-2:]] == ["stream before", "device before"]
