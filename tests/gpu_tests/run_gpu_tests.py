"""Checks and timings on a machine with one NVIDIA GPU; ``make test-gpu`` runs it.

Each step is a process of its own under a time limit: what fails or hangs does not keep
the later ones from running. All of them together take less than 8 minutes. The tables
at the end say what was found; ``--output`` writes them as Markdown for
docs/gpu_evidence.md.

Exit status: 0, everything passed; 1, something failed or did not end in time; 77,
there is no GPU, and nothing was done.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

# They need no package, so that any Python can say that there is no GPU.
from gpu_tests import results  # noqa: E402
from gpu_tests.find_gpu import why_no_gpu  # noqa: E402
from gpu_tests.steps import Command, NotHere, Step, paths, result_tables, steps  # noqa: E402
from gpu_tests.tables import Table  # noqa: E402

NO_GPU = 77
TOTAL_LIMIT_S = 460.0
N_LINES_OF_A_FAILURE = 40


@dataclass
class Outcome:
    """What became of a step.

    Attributes:
        step: it.
        verdict: ``"passed"``, ``"FAILED"`` or ``"not run"``.
        seconds: how long it took.
        details: what its program said of itself, or why it has not passed.
        rows: table and cells of each row that its program told.
        output: all that its program printed.
    """

    step: Step
    verdict: str
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)
    rows: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    output: str = ""


def run_step(step: Step, limit_s: float) -> Outcome:
    """Run a step to its end, or to its time limit."""
    start = time.monotonic()
    try:
        command = step.command()
        left_s = limit_s - (time.monotonic() - start)
        outcome = run_command(step, command, max(left_s, 1.0))
    except NotHere as reason:
        outcome = Outcome(step, "not run", details=[str(reason)])
    outcome.seconds = time.monotonic() - start
    return outcome


def run_command(step: Step, command: Command, limit_s: float) -> Outcome:
    """Run a step's process and judge it."""
    from helpers.jobs import run_command as run

    folders = [*paths(), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**command.env, "PYTHONPATH": os.pathsep.join(folders)}
    try:
        job = run(command.argv, timeout_s=limit_s, env=env)
    except AssertionError as error:
        details = [f"did not end within {limit_s:.0f} s"]
        return Outcome(step, "FAILED", details=details, output=str(error))
    outcome = Outcome(step, "passed", output=job.output)
    if (job.returncode != 0) != command.must_fail:
        wanted = "another status" if command.must_fail else "0"
        outcome.details.append(f"exit status {job.returncode}, expected {wanted}")
    for text in command.texts:
        if text not in job.output:
            outcome.details.append(f"its output lacks {text!r}")
    if outcome.details:
        outcome.verdict = "FAILED"
    for table, cells in results.read(job.stdout):
        if table:
            outcome.rows.append((table, cells))
        else:
            outcome.details += cells
    return outcome


def run_steps(
    chosen: Sequence[Step], *, total_limit_s: float, patience: float = 1.0
) -> list[Outcome]:
    """Run steps one after the other; say of each how it went.

    Args:
        chosen: the steps.
        total_limit_s: a step gets no more time than is left of this.
        patience: factor on all time limits.
    """
    end = time.monotonic() + total_limit_s * patience
    outcomes = []
    for step in chosen:
        print(f"{step.what:30} ", end="", flush=True)
        left_s = end - time.monotonic()
        if left_s < 1:
            outcome = Outcome(step, "FAILED", details=["no time was left for it"])
        else:
            outcome = run_step(step, min(step.limit_s * patience, left_s))
        outcomes.append(outcome)
        details = "; ".join(outcome.details)
        print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {details}", flush=True)
        if outcome.verdict == "FAILED":
            for line in outcome.output.splitlines()[-N_LINES_OF_A_FAILURE:]:
                print(f"    {line}", flush=True)
    return outcomes


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """Return the tables with their rows, without those that are empty."""
    summary = Table("Steps", ["step", "verdict", "seconds", ""])
    tables = result_tables()
    for outcome in outcomes:
        summary.rows.append(
            [
                outcome.step.what,
                outcome.verdict,
                f"{outcome.seconds:.1f}",
                "; ".join(outcome.details),
            ]
        )
        for name, cells in outcome.rows:
            tables[name].rows.append(cells)
    return [t for t in (tables.pop("environment"), summary, *tables.values()) if t.rows]


def markdown(tables: Sequence[Table], outcomes: Sequence[Outcome]) -> str:
    """Return a section for docs/gpu_evidence.md."""
    found = dict(cells for o in outcomes for t, cells in o.rows if t == "environment")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [f"## {today}: {found.get('GPU', 'a GPU')}"]
    return "\n\n".join([*parts, *(table.markdown() for table in tables)]) + "\n"


def main(args: Sequence[str] | None = None) -> int:
    """Run the steps; return the exit status."""
    all_steps = steps()
    names = [step.name for step in all_steps]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--output", type=pathlib.Path, help="file for the Markdown")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on all time limits"
    )
    parser.add_argument(
        "--only-look-for-gpu", action="store_true", help="say if there is none"
    )
    options = parser.parse_args(args)
    unknown = sorted(set(options.steps) - set(names))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(names)}")
    reason = why_no_gpu()
    if reason is not None:
        print(f"no GPU tests on this machine: {reason}")
        return NO_GPU
    if options.only_look_for_gpu:
        return 0
    chosen = [s for s in all_steps if not options.steps or s.name in options.steps]
    outcomes = run_steps(chosen, total_limit_s=TOTAL_LIMIT_S, patience=options.patience)
    tables = tables_of(outcomes)
    print("", *(table.text() for table in tables), sep="\n\n", flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(markdown(tables, outcomes), encoding="utf-8")
        print(f"\nMarkdown: {options.output}", flush=True)
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
