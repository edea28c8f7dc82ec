"""Programs shown in the documents run as they are."""

from __future__ import annotations

import pathlib
import re

import pytest
from helpers.jobs import run_job

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "source"


def program(document: str, number: int = 0) -> str:
    """Return a Python block of a document."""
    blocks = re.findall(r"```python\n(.*?)```", (SOURCE / document).read_text(), re.S)
    return blocks[number]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_communicator_of_ones_own(n_ranks, tmp_path):
    path = tmp_path / "tree_demo.py"
    path.write_text(program("own_communicator.md"))
    job = run_job(n_ranks, [str(path)])
    assert job.returncode == 0, job.output
    lines = re.findall(rf"rank (\d) of {n_ranks}: ([\d.]+)", job.stdout)
    mean = str((n_ranks - 1) / 2)
    assert sorted(lines) == [(str(rank), mean) for rank in range(n_ranks)], job.output


def test_communicator_of_ones_own_is_short():
    lines = program("own_communicator.md").splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_engine_without_chainer():
    code = program("communicators.md", 1)
    code += "\nassert (total == 3).all() and len(blocks) == 3 and text == 'any object'"
    code += "\nimport sys\nassert 'chainer' not in sys.modules"
    job = run_job(3, ["-c", code])
    assert job.returncode == 0, job.output
