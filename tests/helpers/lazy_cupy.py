"""CuPy's interface on host memory, with streams that work as late as they may.

The engine's code for GPUs runs on it without a GPU, and a missing event or wait shows
as wrong numbers: nothing that is enqueued happens before somebody synchronises, freed
memory is overwritten in the order of the stream that was current then, and new memory
holds garbage. Kernels are the real source, compiled as host C++; NCCL calls go through
the real pynccl binding to the emulator, when their turn comes on their stream.

:func:`install` puts it in the place of ``cupy`` in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

#: Whether NCCL's streams work at once, while the others still wait: that shows whether
#: NCCL is made to wait for what fills its buffers.
is_nccl_early = os.environ.get("LAZY_CUPY_EARLY_NCCL") == "1"

#: What happened, for tests: launches of kernels, calls of NCCL, waits of the host.
log: list[str] = []

# CUDA's number of the device that this process has chosen.
current_device = 0


# -- streams and events ------------------------------------------------------------


class Event:
    """Happens when its stream comes to the place where it was recorded."""

    _pointers = itertools.count(0xE000)
    by_pointer: ClassVar[Any] = weakref.WeakValueDictionary()

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._stream: Stream | None = None
        self.ptr = next(self._pointers)
        self.by_pointer[self.ptr] = self
        self.has_happened = True
        self.happened_at_s = 0.0
        self._polls = 0

    def record(self, stream: Stream | None = None) -> None:
        """Put a mark behind what the stream holds now."""
        self._stream = stream or get_current_stream()
        self.has_happened = False
        self._stream.queue.append(self._happen)

    def _happen(self) -> None:
        self.has_happened = True
        self.happened_at_s = time.perf_counter()

    def force(self) -> None:
        """Let the stream work until the mark."""
        while not self.has_happened:
            assert self._stream is not None
            self._stream.step()

    @property
    def done(self) -> bool:
        """Whether it has happened; the device gets on while it is asked."""
        self._polls += 1
        if self._polls % 3 == 0:
            self.force()
        return self.has_happened

    def synchronize(self) -> None:
        """Wait for it on the host."""
        log.append("host waits for an event")
        self.force()


def get_elapsed_time(start: Event, end: Event) -> float:
    """Return the milliseconds between two events that have happened."""
    assert start.has_happened
    assert end.has_happened
    return (end.happened_at_s - start.happened_at_s) * 1e3


class Stream:
    """A queue of work."""

    null: Stream
    _numbers = itertools.count(1)
    by_pointer: ClassVar[Any] = weakref.WeakValueDictionary()

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.ptr = 0 if null else 0x5000 + next(self._numbers)
        self.by_pointer[self.ptr] = self

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event."""
        self.queue.append(event.force)

    def record(self, event: Event | None = None) -> Event:
        """Record an event here."""
        event = event or Event()
        event.record(self)
        return event

    def step(self) -> None:
        """Do the first piece of work."""
        work = self.queue.popleft()
        work()

    def synchronize(self) -> None:
        """Wait on the host until everything is done."""
        log.append("host waits for a stream")
        while self.queue:
            self.step()

    def __enter__(self) -> Stream:
        _stack.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _stack.pop()


Stream.null = Stream(null=True)
_stack = [Stream.null]


def get_current_stream(device_id: int = -1) -> Stream:
    """Return CuPy's current stream."""
    return _stack[-1]


def _enqueue(work: Callable[[], None]) -> None:
    get_current_stream().queue.append(work)


# -- memory ------------------------------------------------------------------------


class MemoryPointer:
    """Memory, and an address in it."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset


class Memory:
    """A piece of CuPy's pool: given back in the order of the current stream."""

    def __init__(self, nbytes: int) -> None:
        self.host = np.full(max(nbytes, 1), 0xAB, np.uint8)
        self.ptr = self.host.ctypes.data
        weakref.finalize(self, _overwrite, self.host).atexit = False


def _overwrite(host: Any) -> None:
    _enqueue(lambda: host.fill(0xCD))


class UnownedMemory:
    """Memory of somebody else."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.owner = owner
        self.ptr = ptr
        block = (ctypes.c_uint8 * size).from_address(ptr) if size else b""
        self.host = np.frombuffer(block, np.uint8, size)


# -- arrays ------------------------------------------------------------------------


class _Flags:
    def __init__(self, host: Any) -> None:
        self.c_contiguous = host.flags.c_contiguous
        self.f_contiguous = host.flags.f_contiguous
        self.owndata = host.base is None


class ndarray:
    """An array on the device; only its metadata can be had without waiting."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None
    ) -> None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if memptr is None:
            memptr = MemoryPointer(Memory(nbytes), 0)
        start = memptr.ptr - memptr.mem.ptr
        block = memptr.mem.host[start : start + nbytes]
        self._adopt(block.view(dtype).reshape(shape), memptr.mem)

    def _adopt(self, host: Any, mem: Any) -> None:
        self._host = host
        self._mem = mem
        self.shape, self.dtype, self.size = host.shape, host.dtype, host.size
        self.ndim, self.nbytes, self.strides = host.ndim, host.nbytes, host.strides
        self.itemsize = host.itemsize
        self.base = None

    def _like(self, host: Any) -> ndarray:
        """Return an array that is a view of this one's memory."""
        view = object.__new__(ndarray)
        view._adopt(host, self._mem)
        view.base = self
        return view

    @property
    def flags(self) -> _Flags:
        return _Flags(self._host)

    @property
    def device(self) -> Device:
        return Device(current_device)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self._host.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._host.ctypes.data, False),
            "strides": self.strides,
            "version": 3,
        }

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> ndarray:
        assert not isinstance(key, ndarray), "reading by a mask waits for the device"
        view = self._host[key]
        if not isinstance(view, np.ndarray):
            key = (*(key if isinstance(key, tuple) else (key,)), np.newaxis)
            view = self._host[key].reshape(())
        return self._like(view)

    def __setitem__(self, key: Any, value: Any) -> None:
        host, mem = self._host, self._mem

        def work() -> None:
            where = key._host if isinstance(key, ndarray) else key
            host[where] = value._host if isinstance(value, ndarray) else value
            assert mem is not None

        _enqueue(work)

    def reshape(self, *shape: Any) -> ndarray:
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        if self._host.flags.c_contiguous:
            return self._like(self._host.reshape(shape))
        return self.copy().reshape(shape)

    @property
    def T(self) -> ndarray:
        return self._like(self._host.T)

    def view(self, dtype: Any) -> ndarray:
        return self._like(self._host.view(dtype))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return _elementwise(lambda a: a.astype(dtype), dtype, self)

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

    def get(self) -> Any:
        """Copy to the host, which waits for the current stream."""
        get_current_stream().synchronize()
        return self._host.copy()

    def __truediv__(self, other: Any) -> ndarray:
        dtype = np.true_divide(np.ones(1, self.dtype), other).dtype
        return _elementwise(lambda a: a / other, dtype, self)

    def __lt__(self, other: Any) -> ndarray:
        return _elementwise(lambda a: a < other, bool, self)

    def __ixor__(self, other: ndarray) -> ndarray:
        host = self._host
        _enqueue(lambda: np.bitwise_xor(host, other._host, out=host))
        return self


def _elementwise(function: Callable[..., Any], dtype: Any, *args: Any) -> ndarray:
    hosts = [a._host if isinstance(a, ndarray) else a for a in args]
    shape = np.broadcast_shapes(*(np.shape(h) for h in hosts))
    result = ndarray(shape, dtype)

    def work() -> None:
        with np.errstate(all="ignore"):
            result._host[...] = function(*hosts)
        assert args is not None

    _enqueue(work)
    return result


def _ufunc(function: Any) -> Callable[..., ndarray]:
    def apply(a: ndarray, b: ndarray, out: ndarray) -> ndarray:
        _enqueue(lambda: function(a._host, b._host, out=out._host))
        return out

    apply.__name__ = function.__name__
    return apply


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Return an array of garbage."""
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """Return an array that will be zero."""
    result = ndarray(shape, dtype)
    result[...] = 0
    return result


def asarray(item: Any, dtype: Any = None) -> ndarray:
    """Return a device array: a view of one, or a copy of a host array."""
    if isinstance(item, ndarray):
        return item
    interface = getattr(item, "__cuda_array_interface__", None)
    if interface is not None:
        host = item.host
        mem = types.SimpleNamespace(ptr=host.ctypes.data, host=host, owner=item)
        view = object.__new__(ndarray)
        view._adopt(host, mem)
        return view
    host = np.array(item, dtype)
    result = ndarray(host.shape, host.dtype)
    result[...] = host
    return result


def ascontiguousarray(a: ndarray) -> ndarray:
    """Return the array itself, or a contiguous copy."""
    return a if a._host.flags.c_contiguous else a.copy()


def isnan(a: ndarray) -> ndarray:
    """Return where an array is NaN."""
    return _elementwise(np.isnan, bool, a)


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    """Choose between two numbers by element."""
    return _elementwise(lambda c: np.where(c, x, y), np.int64, condition)


# -- the device, its runtime and its kernels -----------------------------------------


class Device:
    """The one device of this process."""

    def __init__(self, device_id: int = 0) -> None:
        self.id = device_id
        self.attributes = {"MultiProcessorCount": 2}
        #: Bytes that are free, and in all.
        self.mem_info = (0, 0)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def synchronize(self) -> None:
        """Wait on the host until all streams have done their work."""
        log.append("host waits for the device")
        while any(stream.queue for stream in list(Stream.by_pointer.values())):
            for stream in list(Stream.by_pointer.values()):
                while stream.queue:
                    stream.step()


_PROPERTIES = {"name": b"lazy", "totalGlobalMem": 0, "major": 0, "minor": 0}


def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    """Enqueue a copy between any two places."""
    assert kind == 4
    work = lambda: ctypes.memmove(target, source, nbytes)  # noqa: E731
    Stream.by_pointer[stream].queue.append(work)


def alloc_pinned_memory(nbytes: int) -> Any:
    """Return host memory."""
    return np.full(nbytes, 0xAB, np.uint8)


class RawModule:
    """Kernels from their source, as host C++.

    ``compile_host`` is set by :func:`install`: it takes the source and returns an
    object whose ``launch(name, grid, block, args)`` runs a kernel at once.
    """

    compile_host: Callable[[str], Any]

    def __init__(self, code: str, **options: Any) -> None:
        self._kernels = type(self).compile_host(code)

    def get_function(self, name: str) -> Callable[..., None]:
        """Return what enqueues a kernel."""

        def launch(grid: Any, block: Any, args: Any) -> None:
            log.append(f"kernel {name}")
            plain = [arg.item() for arg in args]
            run = self._kernels.launch
            _enqueue(lambda: run(name, grid[0], block[0], plain))

        return launch


# -- NCCL ----------------------------------------------------------------------------


def _enqueue_nccl(call: Callable[[], None], stream: int) -> None:
    """Let NCCL work as late as it may, or (see the module) as early as it may."""
    queue = Stream.by_pointer[stream].queue
    queue.append(call)
    while queue and is_nccl_early:
        Stream.by_pointer[stream].step()


class LazyCommunicator:
    """An NCCL communicator whose calls happen when their stream comes to them."""

    _DEFERRED = frozenset(
        {"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"}
        | {"send", "recv"}
    )

    def __init__(self, binding: LazyBinding, real: Any) -> None:
        self._binding = binding
        self._real = real
        self.rank, self.size = real.rank, real.size

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if name not in self._DEFERRED:
            return method

        def deferred(*args: Any) -> None:
            *front, stream = args
            log.append(f"nccl {name} on stream {stream:#x}")
            self._binding.defer(lambda: method(*front, 0), stream)

        return deferred

    def split(self, color: int | None, key: int) -> Any:
        """Split the real one."""
        part = self._real.split(color, key)
        return None if part is None else LazyCommunicator(self._binding, part)


class LazyBinding:
    """A binding of NCCL whose calls are enqueued."""

    memory = "cuda"

    def __init__(self, real: Any) -> None:
        self._real = real
        self._group: list[Callable[[], None]] | None = None
        self._group_stream = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> LazyCommunicator:
        """Make a communicator at once."""
        return LazyCommunicator(self, self._real.init_rank(size, unique_id, rank))

    def defer(self, call: Callable[[], None], stream: int) -> None:
        """Enqueue a call, or keep it for the end of its group."""
        if self._group is None:
            _enqueue_nccl(call, stream)
        else:
            self._group.append(call)
            self._group_stream = stream

    def group_start(self) -> None:
        """Begin a group."""
        self._group = []

    def group_end(self) -> None:
        """Enqueue the calls of a group as one piece of work."""
        calls, self._group = self._group or [], None

        def work() -> None:
            self._real.group_start()
            for call in calls:
                call()
            self._real.group_end()

        _enqueue_nccl(work, self._group_stream)


def install(device_id: int, compile_host: Callable[[str], Any]) -> Any:
    """Become ``cupy`` in this process, and make the NCCL bindings lazy.

    Args:
        device_id: the number of the device that this process uses.
        compile_host: see :class:`RawModule`.

    Returns:
        module: what ``import cupy`` gives from now on.
    """
    global current_device
    current_device = device_id
    RawModule.compile_host = staticmethod(compile_host)
    module = types.ModuleType("cupy")
    module.__version__ = "lazy"  # type: ignore[attr-defined]
    for item in (ndarray, empty, zeros, asarray, ascontiguousarray, isnan, where):
        setattr(module, item.__name__, item)
    module.RawModule = RawModule  # type: ignore[attr-defined]
    for function in (np.add, np.multiply, np.maximum, np.minimum):
        setattr(module, function.__name__, _ufunc(function))
    runtime = types.SimpleNamespace(
        getDevice=lambda: current_device,
        getDeviceProperties=lambda i: dict(_PROPERTIES),
        deviceGetPCIBusId=lambda i: f"0000:{i:02x}:00.0",
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        memcpyAsync=memcpy_async,
        memcpyDefault=4,
        eventQuery=lambda pointer: 0 if Event.by_pointer[pointer].done else 600,
    )
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        Event=Event,
        MemoryPointer=MemoryPointer,
        Stream=Stream,
        UnownedMemory=UnownedMemory,
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=get_current_stream,
        get_elapsed_time=get_elapsed_time,
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        runtime=runtime,
    )
    sys.modules["cupy"] = module

    from communicators import UnavailableError, nccl_bindings

    load = nccl_bindings.load
    lazy: dict[str, LazyBinding] = {}

    def load_lazily(name: str) -> Any:
        if name == "cupy":
            raise UnavailableError("CuPy's lazy stand-in has no NCCL")
        return lazy.setdefault(name, LazyBinding(load(name)))

    nccl_bindings.load = load_lazily  # type: ignore[assignment]
    return module


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Give what is logged inside of a ``with`` block."""
    start = len(log)
    found: list[str] = []
    yield found
    found += log[start:]
