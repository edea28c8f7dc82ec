"""The whole test-suite, part by part, each under a time limit.

``python tests/run_suite.py`` runs every part; names choose some, for example
``python tests/run_suite.py ranks-3``. Run it by the Python of the environment that
has the test extra (``make test`` does). Some parts need further environments and
make them by ``make``: one with Open MPI, one with a newer Python where the machine
has one, one with the NCCL bindings and no NCCL. Parts that mostly wait or
start programs run two at a time, those of several busy ranks one after the other; the
output of each stays together. The end of the output says what ran, how long it took,
and what was skipped and why; the exit status is non-zero when any part failed.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from suite.commands import Outcome, Writer, run
from suite.parts import PARTS, NotHere

_stdout_lock = threading.Lock()


def run_part(name: str, write: Writer) -> Outcome:
    """Run one part to its end, also after a failure inside it."""
    outcome = Outcome(name, "passed")
    start = time.monotonic()
    try:
        for command in PARTS[name].commands():
            if not run(command, outcome, write):
                outcome.verdict = "FAILED"
    except NotHere as reason:
        outcome.verdict = "skipped"
        outcome.skips.append(str(reason))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        write(f"{error}\n")
        outcome.verdict = "FAILED"
    outcome.seconds = time.monotonic() - start
    return outcome


def run_beside_others(name: str) -> Outcome:
    """Run one part; print its output when it has ended."""
    with _stdout_lock:
        print(f"===== {name} begins", flush=True)
    lines: list[str] = []
    outcome = run_part(name, lines.append)
    with _stdout_lock:
        print(f"\n===== {name}\n{''.join(lines)}", end="", flush=True)
    return outcome


def run_alone(name: str) -> Outcome:
    """Run one part; print its output as it comes."""
    print(f"\n===== {name}", flush=True)
    return run_part(name, lambda text: print(text, end="", flush=True))


def run_parts(names: Sequence[str]) -> list[Outcome]:
    """Run parts: two at a time where they leave cores idle, then the others."""
    alone = [name for name in names if PARTS[name].is_alone]
    beside = [name for name in names if not PARTS[name].is_alone]
    if len(beside) == 1:
        alone, beside = [*beside, *alone], []
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run_beside_others, beside))
    return outcomes + [run_alone(name) for name in alone]


def report(outcomes: Sequence[Outcome]) -> None:
    """Print what ran, for how long, and what was skipped and why."""
    print("\n===== summary")
    for outcome in outcomes:
        counts = ", ".join(f"{n} {word}" for word, n in outcome.counts.items())
        print(
            f"{outcome.name:13} {outcome.verdict:8} {outcome.seconds:6.0f} s  {counts}"
        )
    for outcome in outcomes:
        for reason in outcome.skips:
            print(f"skipped in {outcome.name}: {reason}")

    def total(*words: str) -> int:
        return sum(o.counts.get(word, 0) for o in outcomes for word in words)

    passed, skipped = total("passed"), total("skipped")
    # A part can fail without a failed test that rank 0 counted.
    failed = total("failed", "error") or sum(o.verdict == "FAILED" for o in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def main() -> int:
    """Run the parts named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    names = [
        # test-1 is what one process runs.
        "unit" if name == "ranks-1" else name
        for name in parser.parse_args().parts or PARTS
    ]
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    outcomes = run_parts(names)
    report(outcomes)
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
