"""What the command line decides for all rows."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How long to measure, and what.

    Attributes:
        is_quick: few repetitions, to see that everything runs; no figures to keep.
        rounds: repetitions of each contender, over all blocks of a row.
        blocks: jobs that these are spread over: a job's memory may lie luckily.
        communicators: ours that compete (``NAME`` or ``NAME:OPTION=VALUE,...``);
            empty for all that can work.
        without_torch: leave torch out also where it is installed.
    """

    is_quick: bool = False
    rounds: int = 21
    blocks: int = 3
    communicators: tuple[str, ...] = ()
    without_torch: bool = False

    def rounds_per_block(self, scale: float = 1.0) -> int:
        """Return the rounds of one job, of ``scale`` times as many in all."""
        return max(2, round(self.rounds * scale / self.blocks))

    def why_no_torch(self) -> str | None:
        """Return why torch does not take part, or None if it does."""
        if self.without_torch:
            return "torch: left out by --without-torch"
        if importlib.util.find_spec("torch") is None:
            return "torch: not installed here (make bench installs it)"
        return None
