"""The README and the documents say what is so.

``python tests/test_readme.py`` writes the diff of the example into the README.
"""

from __future__ import annotations

import difflib
import pathlib
import re
import subprocess

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
BEFORE = "examples/mnist/train_mnist_single.py"
AFTER = "examples/mnist/train_mnist.py"
DOCUMENTS = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "docs" / "gpu_evidence.md",
    *sorted((REPOSITORY / "docs" / "source").rglob("*.md")),
]
_DIFF = re.compile(r"(?<=```diff\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"```(?:sh|text|)\n(.*?)```|`(make [^`]*)`", re.DOTALL)


def example_diff() -> str:
    """Return the unified diff between the example and its port."""
    before, after = (
        (REPOSITORY / path).read_text().splitlines(keepends=True)
        for path in (BEFORE, AFTER)
    )
    return "".join(difflib.unified_diff(before, after, BEFORE, AFTER, n=1))


def test_readme_shows_the_diff_of_the_example():
    assert _DIFF.findall(README.read_text()) == [example_diff()], (
        "run: python tests/test_readme.py"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_make_commands_in_documents_exist(document):
    text = "\n".join(a or b for a, b in _BLOCK.findall(document.read_text()))
    for goal in re.findall(r"^make (\S+)", text, re.MULTILINE):
        done = subprocess.run(
            ["make", "--dry-run", goal],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"make {goal}: {done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_named_in_documents_exist(document):
    text = document.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for path in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (document.parent / path).exists(), path
    for path in re.findall(r"\b(?:constraints|examples|benchmarks)/[\w/.]*\w", text):
        assert (REPOSITORY / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_code_block_is_closed(document):
    is_open = False
    for line in document.read_text().splitlines():
        if line.startswith("```"):
            # What opens a block may name a language; what closes one may not.
            assert not (is_open and line.strip("`")), line
            is_open = not is_open
    assert not is_open


def test_first_screen_has_the_commands():
    first_screen = README.read_text().split("\n## ")[0]
    for command in (
        "make demo",
        "make test",
        'pip install --build-constraint constraints/build.txt ".[mpich,examples]"',
        'PIP_CONSTRAINT=constraints/build.txt pip install ".[mpich,examples]"',
        'uv venv --allow-existing && uv pip install ".[mpich,examples]"',
    ):
        assert command in first_screen


if __name__ == "__main__":
    # A function, since backslashes in the diff are no group references.
    README.write_text(_DIFF.sub(lambda _match: example_diff(), README.read_text()))
