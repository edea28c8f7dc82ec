"""Each public module of ChainerMN 7.8.1 can be imported by its old name."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
import sys

import chainermn_ng  # noqa: F401  makes Chainer importable, and ChainerMN with it

import pytest
from helpers.jobs import run_command

PROGRAM = pathlib.Path(__file__).parent / "programs" / "old_modules.py"
ONE_CLASS = "ImportError: {}: chainermn_ng has one class for all kinds of communicators"

#: One class stands for all kinds of communicators.
KINDS = {
    "chainermn.communicators.dummy_communicator.DummyCommunicator",
    "chainermn.communicators.flat_communicator.FlatCommunicator",
    "chainermn.communicators.naive_communicator.NaiveCommunicator",
    "chainermn.communicators.non_cuda_aware_communicator.NonCudaAwareCommunicator",
    "chainermn.communicators.pure_nccl_communicator.PureNcclCommunicator",
}
#: What only ChainerMN's own code used.
INNER = {
    "chainermn.functions.batch_normalization.MultiNodeBNImplSelector",
    "chainermn.functions.batch_normalization.get_communication_backend",
}


def own_names(source: str) -> list[str]:
    """Return the public functions and classes that a module defines."""
    definitions = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(source).body if isinstance(node, definitions)]
    return [node.name for node in nodes if not node.name.startswith("_")]


def modules_of_chainermn() -> dict[str, list[str]]:
    """Return the public names of each public module of the ChainerMN beside Chainer."""
    root = pathlib.Path(importlib.util.find_spec("chainermn").origin).parent
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts):
            modules[".".join(parts)] = own_names(path.read_text())
    return modules


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    asked = tmp_path_factory.mktemp("old") / "modules.json"
    modules = modules_of_chainermn()
    assert len(modules) > 30
    asked.write_text(json.dumps(modules))
    run = run_command([sys.executable, "-m", "chainermn_ng", str(PROGRAM), str(asked)])
    assert run.returncode == 0, run.output
    return {
        f"{module}.{name}": result
        for module, names in json.loads(run.stdout.splitlines()[-1]).items()
        for name, result in names.items()
    }


def test_all_other_names_are_found_and_ours(found):
    missing = {path for path, origin in found.items() if origin != "chainermn_ng"}
    assert missing == KINDS | INNER


def test_classes_of_one_kind_tell_how_to_make_it(found):
    for path in KINDS:
        assert found[path].startswith(ONE_CLASS.format(path)), found[path]
