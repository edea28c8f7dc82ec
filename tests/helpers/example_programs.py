"""Run the examples as their docstrings say, and read what they leave."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import shlex
from collections.abc import Sequence

from helpers.jobs import REPOSITORY, JobResult, run_job

EXAMPLES = REPOSITORY / "examples"

_LINE = re.compile(r"^ *(mpiexec -n (\d+) python (examples/\S+\.py)( .*)?)$", re.M)


def programs() -> list[str]:
    """Return the programs with a ``main()``, relative to the examples' folder."""
    return [
        str(path.relative_to(EXAMPLES))
        for path in sorted(EXAMPLES.rglob("*.py"))
        if "\ndef main(" in path.read_text()
    ]


def documented_commands(program: str) -> list[list[str]]:
    """Return the lines with mpiexec in a program's docstring, as words."""
    tree = ast.parse((EXAMPLES / program).read_text())
    return commands_in(ast.get_docstring(tree) or "")


def commands_in(text: str) -> list[list[str]]:
    """Return the lines of a text that start examples by mpiexec, as words."""
    joined = re.sub(r" *\\\n *", " ", text)
    return [shlex.split(match[1]) for match in _LINE.finditer(joined)]


def accepted_flags(source: str) -> set[str]:
    """Return the options that a program's parser knows."""
    return set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", source))


def run_example(
    program: str,
    out: pathlib.Path,
    more: Sequence[str] = (),
    *,
    n_ranks: int | None = None,
    timeout_s: float = 90.0,
) -> JobResult:
    """Run the line of a program's docstring, with ``--smoke`` and ``--out``.

    Args:
        program: relative to the examples' folder.
        out: where it writes.
        more: further arguments.
        n_ranks: instead of the number in the docstring.
        timeout_s: for all of it.

    Raises:
        AssertionError: it failed; the text is what it printed.
    """
    commands = documented_commands(program)
    smoke = [command for command in commands if "--smoke" in command]
    _, _, n, _, *argv = (smoke or commands)[0]
    argv += [] if smoke else ["--smoke"]
    argv += ["--out", str(out), *more]
    job = run_job(n_ranks or int(n), argv, timeout_s=timeout_s, cwd=REPOSITORY)
    assert job.returncode == 0, job.output
    return job


def read_log(out: pathlib.Path) -> list[dict[str, float]]:
    """Return what LogReport has written, one entry an epoch."""
    return json.loads((out / "log").read_text())


def digests(job: JobResult) -> list[str]:
    """Return what the ranks printed as digests of their parameters, by rank."""
    lines = re.findall(r"^parameters .*of rank (\d+): (.+)$", job.stdout, re.M)
    assert [int(rank) for rank, _ in lines] == list(range(len(lines))), job.output
    return [text for _, text in lines]
