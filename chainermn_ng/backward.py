"""Chainer's backward pass, telling of each parameter when its gradient is final.

Chainer sets the gradients of parameters when the whole pass is over, and none of its
hooks tells when one of them will not change any more. The walk here takes the same
functions in the same order with the same arithmetic, and counts for each leaf of the
graph how many functions still have it as an input.

The rules that it keeps are those of Chainer 7.8.1: ``Variable.backward`` and what it
calls in ``chainer/_backprop.py`` and ``chainer/_backprop_utils.py``. What one function
does to gradients is still done by Chainer.
"""

from __future__ import annotations

import heapq
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
from chainer import _backprop_utils, backend, variable
from chainer.functions.util.forget import Forget


def hides_parameters(function: chainer.FunctionNode) -> bool:
    """Tell whether a function may use parameters that the graph does not show.

    :func:`chainer.functions.forget` runs a backward pass of its own, within this one,
    on a graph that it builds then. Other functions that do so have a true attribute
    ``hides_parameters``.
    """
    return isinstance(function, Forget) or getattr(function, "hides_parameters", False)


def can_walk(loss: Any) -> bool:
    """Tell whether :func:`backward` can take the place of the loss's own method.

    Not for ChainerX arrays, whose graph Chainer does not hold, and not for classes
    that define a ``backward`` of their own.
    """
    return (
        isinstance(loss, chainer.Variable)
        and type(loss).backward is chainer.Variable.backward
        and not loss._has_chainerx_array
    )


def backward(
    loss: chainer.Variable,
    on_final: Callable[[chainer.Parameter], None],
    *,
    retain_grad: bool = False,
    enable_double_backprop: bool = False,
    loss_scale: float | None = None,
    holds: Callable[[chainer.FunctionNode], bool] = hides_parameters,
) -> None:
    """Run ``loss.backward()`` and call back when a parameter's gradient is final.

    All gradients are bit-identical to those of Chainer's method. When ``on_final`` is
    called, gradient and loss scale of the parameter have been set, and nothing here
    refers to the gradient any more. Parameters of which it is not told (they are not
    reached, or :func:`can_walk` says no) are final when this returns.

    Args:
        loss: as in Chainer; :attr:`grad` may be set beforehand.
        on_final: called with a parameter, at most once for each.
        retain_grad: as in Chainer.
        enable_double_backprop: as in Chainer.
        loss_scale: as in Chainer.
        holds: tells whether nothing may be final while a function is still to come.

    Raises:
        Exception: what a function, a hook, or ``on_final`` raises.
    """
    if not can_walk(loss):
        loss.backward(retain_grad, enable_double_backprop, loss_scale)
        return
    _set_first_gradient(loss, loss_scale)
    gradient = loss.grad_var
    loss.grad_var = None
    with chainer.using_config("enable_backprop", enable_double_backprop):
        walk = _Walk(loss.node, on_final, holds, retain_grad, loss_scale)
        walk.begin(gradient)
        del gradient
        walk.run()


def order_of_completion(loss: Any) -> list[chainer.Parameter]:
    """Return the parameters in the order in which their gradients become final.

    Computes nothing: follows the graph as the backward pass will, if each function
    returns a gradient for each input that asks for one.

    Args:
        loss: what :func:`backward` will start from.

    Returns:
        list[chainer.Parameter]: those that the pass reaches; none if :func:`can_walk`
        says no.
    """
    if not can_walk(loss):
        return []
    last_visits: dict[variable.VariableNode, None] = {}
    queue = _Queue()
    for node in [loss.node, *_inputs_in_order(loss.node, queue)]:
        if node.creator_node is None:
            last_visits.pop(node, None)
            last_visits[node] = None
    found = [node.get_variable_or_none() for node in last_visits]
    return [leaf for leaf in found if isinstance(leaf, chainer.Parameter)]


def functions_of(loss: Any) -> Iterator[chainer.FunctionNode]:
    """Yield the functions that a backward pass from ``loss`` can reach, in any order.

    None if :func:`can_walk` says no.
    """
    if can_walk(loss):
        yield from _reachable(loss.node)


class _Queue:
    """Functions to be visited: the deepest first, of equal depth the first found."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, chainer.FunctionNode]] = []
        self._found: set[chainer.FunctionNode] = set()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, function: chainer.FunctionNode | None) -> None:
        """Put a function in, unless it has been put in before."""
        if function is not None and function not in self._found:
            heapq.heappush(self._heap, (-function.rank, len(self._found), function))
            self._found.add(function)

    def pop(self) -> chainer.FunctionNode:
        return heapq.heappop(self._heap)[2]


class _Walk:
    """One backward pass.

    Args:
        root: node of the loss.
        on_final: see :func:`backward`, as the others.
    """

    def __init__(
        self,
        root: variable.VariableNode,
        on_final: Callable[[chainer.Parameter], None],
        holds: Callable[[chainer.FunctionNode], bool],
        retain_grad: bool,
        loss_scale: float | None,
    ) -> None:
        self._root = root
        self._on_final = on_final
        self._holds = holds
        self._retain_grad = retain_grad
        self._loss_scale = loss_scale
        self._is_debug = chainer.is_debug()
        self._queue = _Queue()
        self._grads = _backprop_utils.GradTable(accumulate_grad_inputs=True)
        # Leaves that some gradient has reached and that have not been set yet.
        self._reached: dict[variable.VariableNode, None] = {}
        # Leaves whose gradient is final while a function holds all of them back.
        self._held: list[variable.VariableNode] = []
        self._n_visits_left: Counter[variable.VariableNode] = Counter()
        self._n_holding = 0
        for function in _reachable(root):
            self._n_visits_left.update(_leaves(function))
            self._n_holding += holds(function)

    def begin(self, gradient: chainer.Variable | None) -> None:
        """Take the gradient of the root."""
        self._grads.accumulate(self._root, gradient)
        if self._root.creator_node is None:
            self._reached[self._root] = None
        self._queue.add(self._root.creator_node)

    def run(self) -> None:
        """Visit all functions that gradients reach, and set those of the leaves."""
        while self._queue:
            function = self._queue.pop()
            for node in self._visit(function):
                if node.creator_node is None:
                    self._reached[node] = None
                else:
                    self._queue.add(node.creator_node)
            self._count(function)
        for node in [*self._held, *self._reached]:
            self._set(node)
        self._grads.assert_no_grads()

    def _count(self, function: chainer.FunctionNode) -> None:
        """Note that a function has been visited; set what is final now."""
        self._n_holding -= self._holds(function)
        for node in _leaves(function):
            self._n_visits_left[node] -= 1
            if self._n_visits_left[node] == 0:
                self._held.append(node)
        if self._n_holding == 0:
            final, self._held = self._held, []
            for node in final:
                self._set(node)

    def _set(self, node: variable.VariableNode) -> None:
        leaf = node.get_variable_or_none()
        if node in self._reached:
            del self._reached[node]
            gradient = self._grads.pop(node)
            if leaf is not None:
                leaf._set_grad_var_without_check(gradient)
                leaf._loss_scale = self._loss_scale
            del gradient
        if isinstance(leaf, chainer.Parameter):
            self._on_final(leaf)

    def _visit(self, function: chainer.FunctionNode) -> list[variable.VariableNode]:
        """Run the backward pass of one function.

        Returns:
            list[VariableNode]: the inputs that have a gradient now.
        """
        inputs = function.inputs
        outputs = [reference() for reference in function.outputs]
        out_grads = tuple(
            None if y is None or y.creator_node is None else self._grads.pop(y)
            for y in outputs
        )
        indexes = tuple(i for i, x in enumerate(inputs) if x.requires_grad)
        if not indexes:
            return []
        in_grads: dict[variable.VariableNode, list[Any]] = {}
        data = tuple(x.data for x in inputs)
        out_arrays = tuple(None if g is None else g.raw_array for g in out_grads)
        hooks = _hooks_of(function)
        with chainer.using_device(backend.get_device_from_array(*data, *out_arrays)):
            for hook in hooks:
                hook.backward_preprocess(function, data, out_arrays)
            for i in indexes:
                if inputs[i] not in in_grads:
                    in_grads[inputs[i]] = self._grads.get_as_list(inputs[i])
            _backprop_utils.backprop_step(
                function, indexes, out_grads, in_grads, self._is_debug
            )
            for hook in hooks:
                hook.backward_postprocess(function, data, out_arrays)
        if self._retain_grad:
            for y, grad in zip(outputs, out_grads, strict=True):
                if y is not None:
                    y._set_grad_var_if_available(grad)
        for x, grads in in_grads.items():
            for grad in grads:
                if grad is not None:
                    variable._check_grad_type(function, x, True, grad.raw_array)
        return [x for x, grads in in_grads.items() if grads]


def _set_first_gradient(loss: chainer.Variable, loss_scale: float | None) -> None:
    """Let a loss of one element that has no gradient have one of ones."""
    if loss.array.size != 1 or loss.grad_var is not None:
        return
    if loss.array.ndim > 0:
        # Chainer's own warning, of the same class.
        warnings.warn(
            f"the loss has the shape {loss.shape}, not (): that an array of one "
            "element passes for a number is deprecated in Chainer. Apply "
            "chainer.functions.squeeze, or set its grad",
            DeprecationWarning,
            stacklevel=3,
        )
    with chainer.using_device(loss.device):
        loss.grad = loss.device.xp.ones_like(loss.array)
    if loss_scale is not None:
        loss.grad *= loss_scale


def _hooks_of(function: chainer.FunctionNode) -> Sequence[Any]:
    """Return the hooks to call; one of the function's own replaces a namesake."""
    hooks = dict(chainer.get_function_hooks())
    if function._n_local_function_hooks:
        hooks.update(function.local_function_hooks)
    return list(hooks.values())


def _leaves(function: chainer.FunctionNode) -> list[variable.VariableNode]:
    """Return the leaves among the inputs that ask for a gradient, each once."""
    asking = dict.fromkeys(x for x in function.inputs if x.requires_grad)
    return [x for x in asking if x.creator_node is None]


def _reachable(root: variable.VariableNode) -> Iterator[chainer.FunctionNode]:
    found = {root.creator_node} - {None}
    stack = list(found)
    while stack:
        function = stack.pop()
        yield function
        creators = [x.creator_node for x in function.inputs if x.requires_grad]
        for creator in creators:
            if creator is not None and creator not in found:
                found.add(creator)
                stack.append(creator)


def _inputs_in_order(
    root: variable.VariableNode, queue: _Queue
) -> Iterator[variable.VariableNode]:
    """Yield the inputs that ask for a gradient, function by function."""
    queue.add(root.creator_node)
    while queue:
        for x in dict.fromkeys(queue.pop().inputs):
            if x.requires_grad:
                queue.add(x.creator_node)
                yield x
