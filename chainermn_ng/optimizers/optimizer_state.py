"""The state of a Chainer optimizer as plain data: to compare, to send, to set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np
from chainer import variable
from chainer.serializer import Deserializer

from chainermn_ng.communicators.parameters import named_parameters, to_host

_LOSS_SCALE_ATTRIBUTES = (
    "_loss_scale",
    "_loss_scaling_is_dynamic",
    "_loss_scaling_multiplier",
    "_loss_scaling_isnan_ever",
)


def describe_hyperparameters(
    optimizer: chainer.Optimizer, parameters: Iterable[tuple[str, chainer.Parameter]]
) -> str:
    """Return what decides on the size of the next step, as a short text.

    Equal on two ranks only if they will take the same step: the step count, the loss
    scale, hyperparameters of the optimizer and of single parameters, hooks, and which
    parameters are frozen. Called at every step.

    Args:
        optimizer: set up on a model.
        parameters: that model's, with their paths, in an order equal on all ranks.
    """
    parts = [f"t={optimizer.t}"]
    if optimizer._loss_scale is not None:
        parts.append(f"loss_scale={optimizer._loss_scale!r}")
    hyperparam = getattr(optimizer, "hyperparam", None)
    if hyperparam is not None:
        parts += _texts(hyperparam.get_dict())
    parts += hook_texts(optimizer)
    special = []
    for name, parameter in parameters:
        rule = parameter.update_rule
        if rule is None:
            continue
        if not rule.enabled:
            special.append(f"{name} frozen")
        if rule._use_fp32_update:
            special.append(f"{name} float32 update")
        hookable = rule._hookable
        if hookable._pre_update_hooks or hookable._post_update_hooks:
            special += [f"{name}.{text}" for text in hook_texts(rule)]
        # Beside the reference to the optimizer's, usually none.
        if len(vars(rule.hyperparam)) > 1:
            own = own_values(rule.hyperparam)
            special += [f"{name}.{text}" for text in _texts(own)]
    if len(special) > 3:
        digest = hashlib.blake2b(repr(special).encode(), digest_size=4).hexdigest()
        special = [f"{len(special)} settings of single parameters ({digest})"]
    return ", ".join(parts + special)


def capture(optimizer: chainer.Optimizer, *, hyperparameters: bool) -> dict[str, Any]:
    """Return the optimizer's state as plain Python data and NumPy arrays.

    Args:
        optimizer: set up on a model.
        hyperparameters: with the hyperparameters and the loss scale, too.
    """
    rules = {
        name: _capture_rule(parameter.update_rule, hyperparameters)
        for name, parameter in named_parameters(optimizer.target)
        if parameter.update_rule is not None
    }
    state: dict[str, Any] = {"t": optimizer.t, "epoch": optimizer.epoch, "rules": rules}
    if hyperparameters:
        hyperparam = getattr(optimizer, "hyperparam", None)
        state["hyperparam"] = None if hyperparam is None else own_values(hyperparam)
        state["loss_scale"] = {
            name: getattr(optimizer, name)
            for name in _LOSS_SCALE_ATTRIBUTES
            if hasattr(optimizer, name)
        }
    return state


def apply(optimizer: chainer.Optimizer, state: dict[str, Any]) -> None:
    """Set what :func:`capture` returned, here or on another rank."""
    optimizer.t = state["t"]
    optimizer.epoch = state["epoch"]
    for name, parameter in named_parameters(optimizer.target):
        if parameter.update_rule is not None and name in state["rules"]:
            _apply_rule(parameter, state["rules"][name])
    if state.get("hyperparam") is not None:
        _set_own_values(optimizer.hyperparam, state["hyperparam"])
    for name, value in state.get("loss_scale", {}).items():
        setattr(optimizer, name, value)


def load(optimizer: chainer.Optimizer, serializer: Deserializer) -> None:
    """Load what Chainer's optimizers save, also from before their first step.

    Then Chainer saves no state of the update rules, and fails to load for want of it.
    """
    for name, parameter in optimizer.target.namedparams():
        rule = parameter.update_rule
        if rule is not None and _has_not_begun(serializer[name]):
            # Both are made at the first step.
            rule._state = None
            rule._fp32_param = None
    optimizer.serialize(_DeserializerOfBeginners(serializer))


class _DeserializerOfBeginners(Deserializer):
    """Gives ``None`` for the state of an update rule that had taken no step."""

    def __init__(self, actual: Deserializer) -> None:
        self._actual = actual

    def __getitem__(self, key: str) -> Deserializer:
        return _DeserializerOfBeginners(self._actual[key])

    def __call__(self, key: str, value: Any) -> Any:
        try:
            return self._actual(key, value)
        except KeyError:
            if value is None and _has_not_begun(self._actual):
                return None
            raise


def _has_not_begun(serializer: Deserializer) -> bool:
    try:
        return bool(serializer("t", 1) == 0)
    except KeyError:
        return False


def digest_of(state: Any) -> bytes:
    """Return 16 bytes that tell states apart, equal for equal ones on all ranks."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, state)
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.shape}{value.dtype.str}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    else:
        digest.update(f"{value!r};".encode())


def hook_texts(owner: Any) -> list[str]:
    """Return name and plain settings of each hook of an optimizer or update rule."""
    hookable = getattr(owner, "_hookable", None)
    if hookable is None:
        return []
    texts = []
    for hooks in (hookable._pre_update_hooks, hookable._post_update_hooks):
        for name, hook in hooks.items():
            plain = ", ".join(_texts(getattr(hook, "__dict__", {})))
            texts.append(f"{name}({plain})")
    return texts


def _texts(values: dict[str, Any]) -> list[str]:
    texts = []
    for key, value in sorted(values.items()):
        value = to_host(value)
        if isinstance(value, np.ndarray):
            text = value.tolist() if value.ndim == 0 else digest_of(value).hex()[:8]
            texts.append(f"{key}={text}")
        elif isinstance(value, np.generic):
            texts.append(f"{key}={value.item()!r}")
        elif value is None or isinstance(value, bool | int | float | str | tuple):
            texts.append(f"{key}={value!r}")
        else:
            # An object's own text may hold its address, which differs between ranks.
            texts.append(f"{key}={type(value).__name__}")
    return texts


def own_values(hyperparam: Any) -> dict[str, Any]:
    """Return the hyperparameters that are set here, not at the optimizer above."""
    return {k: to_host(v) for k, v in vars(hyperparam).items() if k != "_parent"}


def _set_own_values(hyperparam: Any, values: dict[str, Any]) -> None:
    """Set what :func:`own_values` returned; others follow the optimizer above again."""
    for name in own_values(hyperparam):
        if name not in values:
            delattr(hyperparam, name)
    vars(hyperparam).update(values)


def _capture_rule(rule: chainer.UpdateRule, hyperparameters: bool) -> dict[str, Any]:
    master = rule._fp32_param
    captured: dict[str, Any] = {
        "t": rule.t,
        "state": None
        if rule.state is None
        else {k: to_host(v) for k, v in rule.state.items()},
        "fp32": None if master is None else to_host(master.array),
    }
    if hyperparameters:
        captured["enabled"] = rule.enabled
        captured["hyperparam"] = own_values(rule.hyperparam)
    return captured


def _apply_rule(parameter: chainer.Parameter, captured: dict[str, Any]) -> None:
    rule = parameter.update_rule
    send = parameter.device.send
    rule.t = captured["t"]
    rule._state = (
        None
        if captured["state"] is None
        else {
            k: send(v) if isinstance(v, np.ndarray) else v
            for k, v in captured["state"].items()
        }
    )
    if captured["fp32"] is None:
        rule._fp32_param = None
    else:
        rule._fp32_param = variable.Parameter(
            send(captured["fp32"]), name=parameter.name
        )
    if "enabled" in captured:
        rule.enabled = captured["enabled"]
        _set_own_values(rule.hyperparam, captured["hyperparam"])
