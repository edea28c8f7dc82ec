"""The metadata is complete, and asks for nothing that is not needed."""

from __future__ import annotations

import ast
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import chainermn_ng
import communicators

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ["communicators", "chainermn_ng"]

# Used where present: device arrays, dtypes that NumPy lacks, NCCL, the command line.
OPTIONAL = {"click", "cupy", "matplotlib", "ml_dtypes", "pynccl", "rich"}

_PRINT_METADATA = """
import json, setuptools
setuptools.setup = lambda **kwargs: print(json.dumps(kwargs))
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__file__": "setup.py"})
"""


@pytest.fixture(scope="module")
def metadata():
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_METADATA],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def sources() -> list[pathlib.Path]:
    """Return all Python files of the two packages."""
    return [p for name in PACKAGES for p in (REPOSITORY / name).rglob("*.py")]


def imported_names(path: pathlib.Path) -> set[str]:
    """Return the top-level names of the packages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_there_is_one_version(metadata):
    assert metadata["version"] == communicators.__version__ == chainermn_ng.__version__
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"\n## [{metadata['version']}]" in changelog


def test_every_folder_with_code_is_packaged(metadata):
    folders = {p.parent.relative_to(REPOSITORY) for p in sources()}
    assert {".".join(f.parts) for f in folders} == set(metadata["packages"])


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_tell_that_they_are_typed(package, metadata):
    assert metadata["package_data"][package] == ["py.typed"]
    assert (REPOSITORY / package / "py.typed").exists()


def test_files_that_are_no_code_are_installed(tmp_path):
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", f"--build-lib={tmp_path}"],
        cwd=REPOSITORY,
        # setuptools would rather be called by pip.
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        timeout=60,
        check=True,
    )
    files = [p for name in PACKAGES for p in (REPOSITORY / name).rglob("*")]
    expected = {
        str(path.relative_to(REPOSITORY))
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "communicators/devices/flat_buffer.cu" in expected
    installed = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path)) for path in installed} == expected


def test_requirements_are_the_imports(metadata):
    imports = set().union(*(imported_names(path) for path in sources()))
    imports -= set(sys.stdlib_module_names) | set(PACKAGES) | OPTIONAL
    required = {re.split(r"\W", r)[0] for r in metadata["install_requires"]}
    assert imports == required


def test_requirements_have_lower_bounds_only(metadata):
    groups = [metadata["install_requires"], *metadata["extras_require"].values()]
    for requirement in itertools.chain.from_iterable(groups):
        assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+", requirement), requirement
    assert metadata["python_requires"] == ">=3.11"


def test_uv_and_pip_have_the_same_build_constraint():
    lines = (REPOSITORY / "constraints" / "build.txt").read_text().splitlines()
    pip = [line for line in lines if line and not line.startswith("#")]
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert pyproject["tool"]["uv"]["build-constraint-dependencies"] == pip
