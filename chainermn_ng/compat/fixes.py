"""What NumPy 2 broke inside Chainer 7.8.1, repaired in Chainer's own modules.

A fix takes one freshly run module. It changes that module's globals, or methods of its
classes, never a function that other modules have imported by name: so it serves a
Chainer that was imported before us just as well.

Chainer's own CPU tests on NumPy 2 showed these, and a comparison of 600 functions,
links and optimizers between NumPy 1.26 and 2.5 the others. Two of Chainer's tests that
fail on NumPy 2 are at fault themselves, and nothing is done about them:

- ``det`` (scaling): the test calls ``float()`` on an array of one element. ``F.det``
  gives what it gave.
- ``softmax_cross_entropy`` of float16 with int64 labels: the test adds up its expected
  value from NumPy scalars, which stay float16 since NumPy 2 and were float64 before.
  The loss itself is the same, and is summed in float32.
"""

from __future__ import annotations

import atexit
import functools
import threading
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

from chainermn_ng.compat.import_hook import Fix
from chainermn_ng.compat.numpy_names import (
    ModuleView,
    NumpyView,
    numpy_with_float,
    numpy_with_list_meshgrid,
)
from chainermn_ng.compat.start_method import warn_of_fork

FIXES: dict[str, Fix] = {}


def _fixes(module_name: str) -> Callable[[Fix], Fix]:
    def register(fix: Fix) -> Fix:
        FIXES[module_name] = fix
        return fix

    return register


def wrap_integer(value: Any, dtype: Any) -> Any:
    """Bring an integer into the range of an integer dtype, as C and NumPy 1 do.

    ``-1`` for uint8 becomes 255; NumPy 2 raises OverflowError instead. Everything that
    is not an integer for an integer dtype comes back unchanged.
    """
    dtype = numpy.dtype(dtype)
    is_integer = isinstance(value, int | numpy.integer) and not isinstance(value, bool)
    if not is_integer or dtype.kind not in "iu":
        return value
    return numpy.asarray(value).astype(dtype)[()]


def widen(value: Any) -> Any:
    """Give NumPy's float scalars and 0-d arrays as float64; the rest unchanged.

    Where Python's own numbers meet a lone NumPy number, NumPy 1 computed in float64;
    NumPy 2 stays in the NumPy number's type, so that sums of float16 overflow.
    """
    if isinstance(value, numpy.floating | numpy.ndarray) and value.ndim == 0:
        return numpy.float64(value) if value.dtype.kind == "f" else value
    return value


@_fixes("chainer._version")
def _know_todays_cupy(module: ModuleType) -> None:
    """Chainer warns of every CuPy but 7; later ones work, without cuDNN from 14 on."""
    for dependency in module._optional_dependencies:
        if dependency["name"] == "CuPy":
            dependency["specifier"] = ">=7.7.0"
            todays = ["cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"]
            dependency["packages"] = [
                *(name for name in todays if name not in dependency["packages"]),
                *dependency["packages"],
            ]


@_fixes("chainer.backends.cuda")
def _cupy_14(module: ModuleType) -> None:
    """CuPy 14 dropped cuDNN, and deprecates ``scatter_add`` for ``add.at``.

    Chainer's warning to install cuDNN would help nobody.
    """
    if module.available and module._cupy_major >= 14:
        module.check_cuda_available._already_warned = True
        module.cupyx = ModuleView(module.cupyx, {"scatter_add": module.cupy.add.at})


@_fixes("chainer.functions.array.get_item")
def _add_at_for_get_item(module: ModuleType) -> None:
    """The gradient calls the method ``scatter_add`` of a CuPy array."""
    original = module.GetItemGrad.forward

    @functools.wraps(original)
    def forward(self: Any, inputs: Any) -> Any:
        xp = module.backend.get_array_module(*inputs)
        if xp is numpy or not hasattr(xp.add, "at"):
            return original(self, inputs)
        chx = module.chainerx.ndarray
        slices = tuple(
            module.backend.from_chx(s) if isinstance(s, chx) else s for s in self.slices
        )
        gradient = xp.zeros(self._in_shape, inputs[0].dtype)
        xp.add.at(gradient, slices, inputs[0])
        return (gradient,)

    module.GetItemGrad.forward = forward


@_fixes("chainer.variable")
def _debug_print_says_cpu(module: ModuleType) -> None:
    """NumPy 2 arrays have a ``device``, "cpu", where Chainer prints its own "CPU"."""
    original = module.Variable.debug_print

    @functools.wraps(original)
    def debug_print(self: Any) -> str:
        return original(self).replace("\n- device: cpu\n", "\n- device: CPU\n")

    module.Variable.debug_print = debug_print


@_fixes("chainer.functions.array.pad_sequence")
def _pad_unsigned(module: ModuleType) -> None:
    original = module.PadSequence.forward

    @functools.wraps(original)
    def forward(self: Any, xs: Any) -> Any:
        self.padding = wrap_integer(self.padding, xs[0].dtype)
        return original(self, xs)

    module.PadSequence.forward = forward


@_fixes("chainer.dataset.convert")
def _pad_unsigned_examples(module: ModuleType) -> None:
    """Also no ``numpy.maximum(a, b, out)``: NumPy 2.5 wants ``out=`` by name."""

    def concat_arrays_with_padding(arrays: Any, padding: Any) -> Any:
        first = arrays[0]
        lengths = zip(*(array.shape for array in arrays), strict=True)
        shape = (len(arrays), *map(max, lengths))
        device = module.backend.get_device_from_array(first)
        with module.chainer.using_device(device):
            fill = wrap_integer(padding, first.dtype)
            result = device.xp.full(shape, fill, dtype=first.dtype)
            for i, array in enumerate(arrays):
                result[(i, *map(slice, array.shape))] = array
        return result

    module._concat_arrays_with_padding = concat_arrays_with_padding


@_fixes("chainer.functions.math.basic_math")
def _constants_of_operators(module: ModuleType) -> None:
    """``x + (-1)`` for unsigned ``x``; ``1 / constant`` of a division in float64."""

    def preprocess_const(x: Any, value: Any) -> Any:
        return x.dtype.type(wrap_integer(value, x.dtype))

    def div(self: Any, rhs: Any) -> Any:
        return original(self, widen(rhs) if numpy.isscalar(rhs) else rhs)

    original = module.div
    functools.update_wrapper(div, original)
    module._preprocess_const = preprocess_const
    module.div = div
    for name in ("__div__", "__truediv__"):
        if getattr(module.variable.Variable, name, None) is original:
            setattr(module.variable.Variable, name, div)


@_fixes("chainer.functions.math.fix")
def _trunc_for_fix(module: ModuleType) -> None:
    """numpy.fix is deprecated since NumPy 2.5 for trunc, which is the same."""
    numpy_with_trunc = NumpyView({"fix": numpy.trunc})
    real = module.backend

    def get_array_module(*args: Any) -> Any:
        xp = real.get_array_module(*args)
        return numpy_with_trunc if xp is numpy else xp

    module.backend = types.SimpleNamespace(get_array_module=get_array_module)


@_fixes("chainer.functions.array.resize_images")
def _float_for_resize_images(module: ModuleType) -> None:
    """Only this function reads numpy.float; others here ask ``xp is numpy``."""
    original = module.compute_indices_and_weights
    module.compute_indices_and_weights = types.FunctionType(
        original.__code__, {**vars(module), "numpy": numpy_with_float}
    )


@_fixes("chainer.distributions.categorical")
def _list_meshgrid_for_categorical(module: ModuleType) -> None:
    """``log_prob``, and with it sampled KL divergence, adds a list to a meshgrid."""
    module.numpy = numpy_with_list_meshgrid


@_fixes("chainer.links.activation.maxout")
def _reshape_for_maxout(module: ModuleType) -> None:
    """Initializers of a Maxout saw the array after ``array.shape = ...``.

    NumPy 2.5 deprecates that; they get a reshaped view now.
    """
    initializer_class = module.initializer.Initializer

    class Reshaped(initializer_class):  # type: ignore[misc, valid-type]
        def __init__(self, initializer: Any, shape: tuple[int, ...]) -> None:
            super().__init__()
            self._initializer = initializer
            self._shape = shape

        def __call__(self, array: Any) -> None:
            self._initializer(array.reshape(self._shape))

    def reshaped(initial: Any, shape: tuple[int, ...]) -> Any:
        plain = callable(initial) and not isinstance(initial, initializer_class)
        return Reshaped(initial, shape) if plain else initial

    original = module.Maxout.__init__

    @functools.wraps(original)
    def init(
        self: Any,
        in_size: int | None,
        out_size: int,
        pool_size: int,
        initialW: Any = None,
        initial_bias: Any = 0,
    ) -> None:
        original(
            self,
            in_size,
            out_size,
            pool_size,
            reshaped(initialW, (out_size, pool_size, -1)),
            reshaped(initial_bias, (out_size, pool_size)),
        )

    module.Maxout.__init__ = init


@_fixes("chainer.optimizer_hooks.gradient_clipping")
def _clip_in_float64(module: ModuleType) -> None:
    """The squared norms of float16 gradients soon add up to more than 65504.

    The sum was float64 in NumPy 1. As float16 it is infinite, and the hook would set
    all gradients to zero without a word.
    """

    def sum_widened(values: Any) -> Any:
        return sum(map(widen, values))

    module.sum = sum_widened


@_fixes("chainer.optimizer_hooks.gradient_lars")
def _lars_in_float64(module: ModuleType) -> None:
    """In float16 norms are coarse or infinite, and ``eps`` (1e-9) is zero."""
    original = module.GradientLARS.__call__

    @functools.wraps(original)
    def call(self: Any, rule: Any, param: Any) -> None:
        data, grad = param.data, param.grad
        if not (isinstance(data, numpy.ndarray) and isinstance(grad, numpy.ndarray)):
            original(self, rule, param)
            return
        data_norm = float(numpy.linalg.norm(data))
        grad_norm = float(numpy.linalg.norm(grad))
        grad += self.weight_decay * data
        if data_norm > self.threshold:
            total = self.eps + grad_norm + self.weight_decay * data_norm
            grad *= data_norm / total

    module.GradientLARS.__call__ = call


@_fixes("chainer.functions.loss.softmax_cross_entropy")
def _one_gradient_of_an_empty_batch(module: ModuleType) -> None:
    """Not NumPy's doing: over no samples Chainer returns one gradient too many.

    Its backward pass fails then, and a rank without samples could not take part in
    the backward pass of layers that work on the batches of all ranks.
    """
    cls = module._SoftmaxCrossEntropyGrad_NoDoubleBackprop

    def first_only(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: Any, inputs: Any) -> Any:
            return original(self, inputs)[:1]

        return forward

    cls.forward_cpu = first_only(cls.forward_cpu)
    cls.forward_gpu = first_only(cls.forward_gpu)


@_fixes("chainer.reporter")
def _summarize_in_float64(module: ModuleType) -> None:
    """The mean of an epoch's losses; a float16 sum stalls or overflows."""
    original = module.Summary.add

    @functools.wraps(original)
    def add(self: Any, value: Any, weight: Any = 1) -> None:
        original(self, widen(value), widen(weight))

    module.Summary.add = add


@_fixes("chainer.training.extensions.micro_average")
def _average_in_float64(module: ModuleType) -> None:
    original = module.MicroAverage.__call__

    @functools.wraps(original)
    def call(self: Any, trainer: Any) -> None:
        self._numerator = widen(self._numerator)
        self._denominator = widen(self._denominator)
        original(self, trainer)

    module.MicroAverage.__call__ = call


@_fixes("chainer.iterators.multiprocess_iterator")
def _set_daemon_without_warning(module: ModuleType) -> None:
    """``Thread.setDaemon`` is deprecated since Python 3.10."""

    class Thread(threading.Thread):
        def setDaemon(self, daemonic: bool) -> None:
            self.daemon = daemonic

    names = {**vars(threading), "Thread": Thread}
    module.threading = types.SimpleNamespace(**names)
    _finalize_at_exit(module.MultiprocessIterator)
    original = module._PrefetchLoop.launch_thread

    @functools.wraps(original)
    def launch_thread(self: Any) -> Any:
        warn_of_fork(stacklevel=4)
        return original(self)

    module._PrefetchLoop.launch_thread = launch_thread


def _finalize_at_exit(iterator_class: Any) -> None:
    """End the worker processes of forgotten iterators before the interpreter ends.

    Their ``__del__`` joins a thread, for which Python 3.13 waits for ever once the
    interpreter is being torn down.
    """
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    original = iterator_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        alive.add(self)

    def finalize_all() -> None:
        for iterator in list(alive):
            iterator.finalize()

    iterator_class.__init__ = init
    atexit.register(finalize_all)
