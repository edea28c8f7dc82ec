"""Reports, plots and progress bars on one rank only."""

from __future__ import annotations

from typing import Any

from chainermn_ng.job_control import rank_and_size


def rank_zero_only(extension: Any, comm: Any = None) -> Any:
    """Let an extension of the trainer work on rank 0 alone.

    For what prints, plots or writes for all ranks, and talks to no other rank::

        trainer.extend(rank_zero_only(extensions.LogReport()))
        trainer.extend(rank_zero_only(extensions.PrintReport(["epoch", "main/loss"])))

    All ranks run these lines. On rank 0 the extension comes back as it is; on the
    others a stand-in of the same name, trigger and priority that does nothing, so
    that the trainers' snapshots have the same entries everywhere and every rank can
    load those of every other. (``if comm.rank == 0: trainer.extend(...)`` gives
    snapshots that rank 0 can't load from the others.) The log in a snapshot is that of
    the rank that wrote it.

    Args:
        extension: an extension, or any callable that serves as one.
        comm: rank 0 of this communicator; ``None`` for that of the whole job.

    Returns:
        ``extension``, or a :class:`SilentExtension` in its place.

    Raises:
        TypeError: ``extension`` cannot be called.
        ValueError: it is one that all ranks must run, or one that asks such a trigger
            by itself, as ``LogReport(trigger=...)`` does. (That of ``trainer.extend``
            is asked on all ranks.)
    """
    if not callable(extension):
        raise TypeError(
            f"rank_zero_only: {type(extension).__qualname__} is no extension"
        )
    for part in (extension, *_held_by(extension)):
        if getattr(part, "is_collective", False) is True:
            raise ValueError(
                f"rank_zero_only: {type(part).__qualname__} works with all ranks "
                "together; attach it on all of them"
            )
    rank = rank_and_size()[0] if comm is None else comm.rank
    return extension if rank == 0 else SilentExtension(extension)


def _held_by(extension: Any) -> list[Any]:
    """Return what an extension may call by itself; the trainer asks ``trigger``."""
    attributes = getattr(extension, "__dict__", {})
    return [value for name, value in attributes.items() if name != "trigger"]


class SilentExtension:
    """Stands in for an extension on ranks where it does nothing.

    Its attributes are those of the extension. It is saved and loaded as that would
    be, but never called, initialized or finalized.

    Args:
        extension: the one that does not work here.
    """

    def __init__(self, extension: Any) -> None:
        self.extension = extension
        # Trainers set it.
        name = getattr(extension, "name", None)
        if name is not None:
            self.name = name

    def __call__(self, trainer: Any) -> None:
        """Do nothing."""

    def initialize(self, trainer: Any) -> None:
        """Do nothing."""

    def finalize(self) -> None:
        """Do nothing."""

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Do nothing."""

    def serialize(self, serializer: Any) -> None:
        """Save or load the state of the extension, so that snapshots fit all ranks."""
        serialize = getattr(self.extension, "serialize", None)
        if serialize is not None:
            serialize(serializer)

    def __getattr__(self, name: str) -> Any:
        if name == "extension" or (name.startswith("__") and name != "__name__"):
            raise AttributeError(name)
        return getattr(self.extension, name)
