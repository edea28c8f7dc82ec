"""NCCL over all ranks."""

from __future__ import annotations

from communicators import nccl_bindings
from communicators.base import CommunicatorBase
from communicators.dtypes import Array
from communicators.errors import UnavailableError


class PureNcclCommunicator(CommunicatorBase):
    """Needs NCCL and one device a rank; this version has no NCCL transport yet.

    Raises:
        UnavailableError: always; the text says what is missing.
    """

    name = "pure_nccl"

    @classmethod
    def missing(cls) -> str | None:
        name = nccl_bindings.default_name()
        return nccl_bindings.missing(name) or (
            f"NCCL {nccl_bindings.load(name).library} is there, but this version of "
            "chainermn_ng has no NCCL transport"
        )

    def all_reduce_flat(self, buffer: Array, op: str) -> None:
        raise UnavailableError(f"pure_nccl: {self.missing()}")
