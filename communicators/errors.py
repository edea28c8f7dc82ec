"""Exceptions of the communicators.

A collective mistake raises the same class with the same text on every rank.
"""

from __future__ import annotations


class CommunicatorError(RuntimeError):
    """Base of all errors that concern more than one rank."""


class MismatchError(CommunicatorError):
    """The ranks called different operations, or the same one with other arrays."""


class RankFailedError(CommunicatorError):
    """An operation failed on some rank, so it cannot complete on any."""


class CommunicationTimeoutError(CommunicatorError, TimeoutError):
    """Some ranks did not come to an operation within ``timeout_s``."""


class TopologyError(CommunicatorError, ValueError):
    """A topology is malformed, or a communicator cannot work on it."""


class UnavailableError(CommunicatorError):
    """A communicator needs something that this machine does not have."""


class NcclError(CommunicatorError):
    """A call of NCCL failed.

    Attributes:
        call: the function of NCCL that failed, such as ``"ncclAllReduce"``.
        code: its ``ncclResult_t``.
        reason: what NCCL said.
    """

    def __init__(self, call: str, code: int, reason: str) -> None:
        # The arguments as they came: what pickles an exception calls the class again.
        super().__init__(call, code, reason)
        self.call = call
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.call} failed with NCCL's code {self.code}: {self.reason}. With "
            "NCCL_DEBUG=WARN in the environment NCCL prints why, with "
            "NCCL_DEBUG=INFO every step of its set-up too"
        )


# A failure on one rank is raised on the others too, as the nearest of these: user
# classes may not exist, or not be constructible from a text, on the other ranks.
_SHARED_TYPES: tuple[type[Exception], ...] = (
    MismatchError,
    CommunicationTimeoutError,
    TopologyError,
    UnavailableError,
    CommunicatorError,
    TypeError,
    ValueError,
    OSError,
)


def shared_type_name(error: BaseException) -> str:
    """Return the name of the class that all ranks raise for ``error``."""
    for cls in _SHARED_TYPES:
        if isinstance(error, cls):
            return cls.__name__
    return RankFailedError.__name__


def build_shared_error(type_name: str, text: str) -> Exception:
    """Return an exception of the class that :func:`shared_type_name` named."""
    for cls in _SHARED_TYPES:
        if cls.__name__ == type_name:
            return cls(text)
    return RankFailedError(text)


def tell_on_one_rank(error: Exception, is_here: bool) -> Exception:
    """Note on an error that all ranks raise which of them is to print it.

    Args:
        error: the same on all ranks.
        is_here: this is that rank.

    Returns:
        Exception: ``error``, whose attribute ``is_told_elsewhere`` says it.
    """
    error.is_told_elsewhere = not is_here  # type: ignore[attr-defined]
    return error


def is_agreed(error: BaseException) -> bool:
    """Tell whether the ranks have settled which of them prints an error."""
    return hasattr(error, "is_told_elsewhere")


def is_raised_by_all(error: BaseException) -> bool:
    """Tell whether all ranks raise an error, or know of it otherwise."""
    return is_agreed(error) or isinstance(
        error, CommunicationTimeoutError | MismatchError | RankFailedError
    )
