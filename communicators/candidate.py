"""A communicator's name with its options, before it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """A communicator to try, or to be compared.

    Attributes:
        name: for ``create_communicator``; in a bench also ``"mpi"``, for the bare MPI
            library.
        options: its options, as sorted pairs.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, **options: Any) -> Candidate:
        """Make one from keyword arguments."""
        return cls(name, tuple(sorted(options.items())))

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self.options]
        return f"{self.name}({', '.join(parts)})" if parts else self.name

    def varied(self, **options: Any) -> Candidate:
        """Return it with other options."""
        return Candidate.of(self.name, **{**dict(self.options), **options})

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads."""
        return {"name": self.name, "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Any) -> Candidate:
        """Read what :meth:`as_json` has made.

        Raises:
            ValueError: it is something else.
        """
        try:
            options = {
                str(key): tuple(item) if isinstance(item, list) else item
                for key, item in value["options"].items()
            }
            return cls.of(str(value["name"]), **options)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no candidate: {value!r}") from error
