"""The entry point of ``chainermn-ng``; says what is missing where click or rich is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

#: What every command is written with. Plots say for themselves that they need more.
PACKAGES = ("click", "rich")


def main(args: Sequence[str] | None = None) -> None:
    """Run ``chainermn-ng``.

    Args:
        args: what follows the program's name; ``None`` for ``sys.argv[1:]``.

    Raises:
        SystemExit: always; 0, or 1 for a failure and 2 for bad input.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"chainermn-ng: the command line needs {' and '.join(missing)}; "
            "the extra 'cli' brings it: pip install '.[cli]' in a checkout of "
            "chainermn_ng",
            file=sys.stderr,
        )
        raise SystemExit(1)
    from chainermn_ng.cli.group import run

    # Not sys.exit, which chainermn_ng takes in a job of several ranks for a failure
    # of this rank alone, and ends the job: the commands leave together.
    raise SystemExit(run(None if args is None else list(args)))
