"""NCCL's numbers of dtypes and reductions."""

from __future__ import annotations

from communicators.nccl_bindings.library import version_parts, version_text

#: dtype name -> ``ncclDataType_t``
NCCL_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}

#: name -> ``ncclRedOp_t``
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

# The first (major, minor) version with what older ones answer with an invalid argument.
_SINCE = {"bfloat16": (2, 10), "avg": (2, 10)}


def type_code(dtype: str, version: int) -> int:
    """Return ``ncclDataType_t`` of a dtype.

    Args:
        dtype: a key of :data:`NCCL_TYPES`.
        version: ``ncclGetVersion``'s number.

    Raises:
        TypeError: NCCL, or this version of it, has no such type.
    """
    if dtype not in NCCL_TYPES:
        raise TypeError(
            f"NCCL has no type for dtype {dtype!r}; it has {', '.join(NCCL_TYPES)}"
        )
    if lacks := _lacks(dtype, version):
        raise TypeError(lacks)
    return NCCL_TYPES[dtype]


def op_code(op: str, version: int) -> int:
    """Return ``ncclRedOp_t`` of a reduction.

    Args:
        op: a key of :data:`NCCL_OPS`.
        version: ``ncclGetVersion``'s number.

    Raises:
        ValueError: NCCL, or this version of it, has no such reduction.
    """
    if op not in NCCL_OPS:
        raise ValueError(f"NCCL has no reduction {op!r}; it has {', '.join(NCCL_OPS)}")
    if lacks := _lacks(op, version):
        raise ValueError(lacks)
    return NCCL_OPS[op]


def _lacks(feature: str, version: int) -> str | None:
    """Return that a version of NCCL is too old for a feature; None if it is not."""
    since = _SINCE.get(feature)
    if since is None or version_parts(version)[:2] >= since:
        return None
    needed = ".".join(map(str, since))
    return f"NCCL {version_text(version)} has no {feature}: it needs {needed} or newer"
