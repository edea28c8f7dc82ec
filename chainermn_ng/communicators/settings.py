"""Settings of a communicator that scripts change by name after its creation.

``allreduce_grad_dtype``
    dtype of gradients while they travel: ``"float16"``, ``"float32"``, ... or ``None``
    for each gradient's own. All ranks must set the same.
``batched_copy``
    always ``True``: gradients travel packed together. Kept for ChainerMN scripts;
    setting it warns that it changes nothing.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import communicators.dtypes

if TYPE_CHECKING:
    from chainermn_ng.communicators.chainer_communicator import ChainerCommunicator

NAMES = ("allreduce_grad_dtype", "batched_copy")


def get_setting(comm: ChainerCommunicator, name: str) -> Any:
    """Return the value of a setting.

    Raises:
        ValueError: no such setting.
    """
    _check_name(name)
    if name == "batched_copy":
        return True
    return comm.engine.allreduce_grad_dtype


def set_setting(comm: ChainerCommunicator, name: str, value: Any) -> None:
    """Change a setting.

    Raises:
        ValueError: no such setting, or a value that it cannot have.
    """
    _check_name(name)
    if name == "batched_copy":
        warn_of_batched_copy(stacklevel=4)
    else:
        dtype = communicators.dtypes.parse_wire_dtype(value)
        comm.engine.allreduce_grad_dtype = dtype


def warn_of_batched_copy(stacklevel: int) -> None:
    """Tell that the option is no longer one."""
    warnings.warn(
        "batched_copy has no effect: gradients always travel packed together "
        "(bucket_bytes says in what portions)",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(
            f"unknown setting {name!r}; known: {', '.join(NAMES)}. Other options are "
            "arguments of create_communicator"
        )
