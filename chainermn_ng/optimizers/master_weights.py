"""The float32 values of float16 parameters in Chainer's snapshots.

With ``use_fp32_update`` an update rule keeps them, and steps that are too small for
float16 add up there. Chainer's own optimizers leave them out of what they save.
"""

from __future__ import annotations

import chainer
import numpy as np
from chainer import variable

_ENTRY = "fp32_param"


def save_master_weights(
    optimizer: chainer.Optimizer, serializer: chainer.Serializer
) -> None:
    """Write them beside the state of each update rule that has one.

    Args:
        optimizer: set up on a model.
        serializer: of the optimizer.
    """
    for name, parameter in optimizer.target.namedparams():
        rule = parameter.update_rule
        if rule is not None and rule._fp32_param is not None:
            serializer[name](_ENTRY, rule._fp32_param.array)


def load_master_weights(
    optimizer: chainer.Optimizer, serializer: chainer.Deserializer
) -> list[str]:
    """Read what :func:`save_master_weights` wrote, after the optimizer's own state.

    The model need not have been loaded. Where the snapshot has none, they are made
    from the model at the next step.

    Returns:
        Paths of the parameters that have lost theirs.
    """
    lost = []
    for name, parameter in optimizer.target.namedparams():
        rule = parameter.update_rule
        if rule is None:
            continue
        try:
            values = serializer[name](_ENTRY, None)
        except KeyError:
            values = None
        # Never those of before the load: the next step would undo it.
        rule._fp32_param = None
        if values is not None:
            rule._fp32_param = variable.Parameter(
                parameter.device.send(np.array(values)), name=parameter.name
            )
        elif rule._use_fp32_update and rule.t > 0 and _is_float16(parameter):
            lost.append(name)
    return lost


def _is_float16(parameter: chainer.Parameter) -> bool:
    if parameter.array is not None:
        return bool(parameter.dtype == np.float16)
    # The model is loaded afterwards; until then its initializer tells.
    dtype = getattr(parameter.initializer, "dtype", None)
    return bool(chainer.get_dtype(dtype) == np.float16)
