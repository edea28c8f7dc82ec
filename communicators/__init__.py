"""Reduce and move arrays over the ranks of an MPI job; knows nothing of Chainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
    from communicators._version import __version__
    from communicators.base import CommunicatorBase
    from communicators.buckets import ArraySpec
    from communicators.errors import (
        CommunicationTimeoutError,
        CommunicatorError,
        MismatchError,
        NcclError,
        RankFailedError,
        TopologyError,
        UnavailableError,
    )
    from communicators.registry import (
        available_communicators,
        create_communicator,
        known_communicators,
        register_communicator,
    )
    from communicators.topology import Topology

__all__ = [
    "ArraySpec",
    "CommunicationTimeoutError",
    "CommunicatorBase",
    "CommunicatorError",
    "MismatchError",
    "NcclError",
    "RankFailedError",
    "Topology",
    "TopologyError",
    "UnavailableError",
    "__version__",
    "available_communicators",
    "create_communicator",
    "known_communicators",
    "register_communicator",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "communicators._version": ["__version__"],
        "communicators.base": ["CommunicatorBase"],
        "communicators.buckets": ["ArraySpec"],
        "communicators.errors": [
            "CommunicationTimeoutError",
            "CommunicatorError",
            "MismatchError",
            "NcclError",
            "RankFailedError",
            "TopologyError",
            "UnavailableError",
        ],
        "communicators.registry": [
            "available_communicators",
            "create_communicator",
            "known_communicators",
            "register_communicator",
        ],
        "communicators.topology": ["Topology"],
    },
)
