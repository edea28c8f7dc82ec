"""NCCL over all ranks."""

from __future__ import annotations

from typing import Any

from communicators.base import Array, CommunicatorBase
from communicators.errors import UnavailableError


class PureNcclCommunicator(CommunicatorBase):
    """Needs NCCL and one device a rank.

    Raises:
        UnavailableError: always in this version, which has no NCCL transport yet; the
            text says what is missing and which communicators work here.
    """

    name = "pure_nccl"

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        raise UnavailableError(self.missing() or "")

    @classmethod
    def missing(cls) -> str | None:
        """Return why it cannot be used here, or ``None``."""
        from communicators.registry import available_communicators

        return (
            f"pure_nccl: {_what_is_missing()}. Communicators that work here: "
            f"{', '.join(available_communicators())}"
        )

    def all_reduce_flat(self, buffer: Array, op: str) -> None:
        raise UnavailableError(self.missing() or "")


def _what_is_missing() -> str:
    try:
        import cupy.cuda.nccl  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        return f"CuPy with NCCL cannot be imported ({error})"
    return (
        f"CuPy's NCCL {cupy.cuda.nccl.get_build_version()} is there, but this version "
        "of chainermn_ng has no NCCL transport"
    )
