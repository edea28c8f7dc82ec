"""Packages import their modules when somebody first asks for a name in them."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jobs import job_environment

import chainermn_ng
import communicators

ROOTS = [Path(package.__file__).parent for package in (chainermn_ng, communicators)]
PACKAGES = [
    "chainermn_ng",
    "chainermn_ng.datasets",
    "chainermn_ng.extensions",
    "chainermn_ng.functions",
    "chainermn_ng.iterators",
    "chainermn_ng.links",
    "chainermn_ng.optimizers",
    "communicators",
]

#: What each of these makes every program pay for.
LOADED_BY_IMPORT = {
    "chainermn_ng",
    "chainermn_ng.compat",
    "chainermn_ng.compat.fixes",
    "chainermn_ng.compat.import_hook",
    "chainermn_ng.compat.messages",
    "chainermn_ng.compat.numpy_names",
    "chainermn_ng.compat.requirements",
    "chainermn_ng.compat.start_method",
    "chainermn_ng.cpu_fallback",
    "chainermn_ng.exit_hooks",
    "chainermn_ng.global_except_hook",
    "chainermn_ng.job_control",
    "communicators",
    "communicators._version",
    "communicators.call_place",
    "communicators.errors",
    "communicators.lazy_names",
    "communicators.leaving",
}


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=job_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bare_import_loads_chainer_and_few_modules_of_ours():
    names = run("import chainermn_ng, sys; print(*sys.modules)").split()
    ours = {
        n for n in names if n.partition(".")[0] in ("chainermn_ng", "communicators")
    }
    assert ours == LOADED_BY_IMPORT
    assert "chainer.training" in names
    assert "mpi4py" not in names


def imports_for_type_checkers(package: str) -> dict[str, str]:
    """Return the names of a package with the modules that they come from."""
    source = Path(importlib.import_module(package).__file__).read_text()
    return {
        alias.name: statement.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for alias in statement.names
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there_for_programs_and_for_tools(package):
    module = importlib.import_module(package)
    names = module.__all__
    assert names == sorted(names)
    assert all(getattr(module, name) is not None for name in names)
    assert set(names) <= set(dir(module))
    # Type checkers see these, and what is imported at once.
    eager = {"__version__", "compat", "cpu_fallback", "global_except_hook"}
    at_once = eager if package == "chainermn_ng" else set()
    assert {*imports_for_type_checkers(package), *at_once} == set(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_absent_name_is_an_error_that_says_so(package):
    module = importlib.import_module(package)
    assert not hasattr(module, "_nothing")
    assert not hasattr(module, "nothing")
    with pytest.raises(AttributeError, match=f"{package}.*no attribute 'nothing'"):
        _ = module.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec(f"from {package} import nothing")


def test_every_way_to_a_name_works():
    run(
        """
import chainermn_ng
assert "create_communicator" in dir(chainermn_ng)
assert "links" in dir(chainermn_ng)
chainermn_ng.extensions.AllreducePersistent  # without a further import
chainermn_ng.seeds.set_seed                  # a module that is no public name
chainermn_ng.communicators.factory.engine_of
import chainermn_ng.optimizers.factory
assert (chainermn_ng.create_multi_node_optimizer
        is chainermn_ng.optimizers.factory.create_multi_node_optimizer)
from chainermn_ng import *
assert create_communicator is chainermn_ng.communicators.create_communicator
assert links.MultiNodeChainList is MultiNodeChainList
from communicators import *
assert CommunicatorBase.__module__ == "communicators.base"
import communicators
assert communicators.topology.Topology is Topology
import pickle
assert pickle.loads(pickle.dumps(MultiNodeChainList)) is MultiNodeChainList
assert pickle.loads(b"cchainermn_ng\\nscatter_dataset\\n.") is scatter_dataset
"""
    )


def test_function_stays_before_the_module_of_its_name():
    run(
        """
import chainermn_ng.functions.pseudo_connect            # the module first
import chainermn_ng.links, chainermn_ng.extensions
assert callable(chainermn_ng.functions.pseudo_connect)
from chainermn_ng.links import create_mnbn_model        # the function first
import chainermn_ng.links.create_mnbn_model
assert chainermn_ng.links.create_mnbn_model is create_mnbn_model
from chainermn_ng.extensions.rank_zero_only import rank_zero_only as by_module
assert chainermn_ng.extensions.rank_zero_only is by_module

from chainermn_ng.launcher.old_name import answer_old_name
answer_old_name()
import chainermn.functions.pseudo_connect
assert chainermn.functions is chainermn_ng.functions
assert callable(chainermn.functions.pseudo_connect)
from chainermn.functions import *
assert pseudo_connect is chainermn.functions.pseudo_connect
"""
    )


def test_threads_may_ask_at_the_same_time():
    run(
        f"""
import sys, threading
import chainermn_ng
sys.setswitchinterval(1e-5)
N_THREADS = 8
barrier = threading.Barrier(N_THREADS)
found = [{{}} for _ in range(N_THREADS)]

import importlib
packages = {PACKAGES!r}
modules = {{package: importlib.import_module(package) for package in packages}}

def look(i):
    barrier.wait()
    for package in packages[i:] + packages[:i]:
        module = modules[package]
        for name in module.__all__:
            found[i][package, name] = getattr(module, name)

threads = [threading.Thread(target=look, args=(i,)) for i in range(N_THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all(found)
for other in found[1:]:
    assert other.keys() == found[0].keys()
    assert all(other[key] is found[0][key] for key in other)
"""
    )


def module_names() -> dict[str, Path]:
    names = {}
    for root in ROOTS:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            names[".".join(p for p in parts if p != "__init__")] = path
    return names


def statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(
            statement.test
        ):
            yield from statements_at_import(statement.orelse)
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from statements_at_import(getattr(statement, part, []))
        elif isinstance(statement, ast.ExceptHandler):
            yield from statements_at_import(statement.body)


def imported_at_import(
    path: Path, modules: dict[str, Path], homes: dict[str, dict[str, str]]
) -> set[str]:
    """Return those of ``modules`` that importing the module at ``path`` imports."""
    found = set()
    for statement in statements_at_import(ast.parse(path.read_text()).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                submodule = f"{statement.module}.{alias.name}"
                found.add(submodule if submodule in modules else statement.module)
                # Asking the package for the name imports the module that has it.
                found.add(homes.get(statement.module, {}).get(alias.name))
    return found & set(modules)


def test_any_module_can_be_the_first_that_is_imported():
    """No module needs itself, by whatever detour; so the order cannot matter.

    Nor can two threads, each in the middle of a module that the other one needs.
    """
    modules = module_names()
    homes = {package: imports_for_type_checkers(package) for package in PACKAGES}
    graph = {
        name: imported_at_import(path, modules, homes) for name, path in modules.items()
    }
    for name in graph:
        graph[name].discard(name)
    assert graph["chainermn_ng.devices"] >= {
        "chainermn_ng.cpu_fallback",
        "chainermn_ng.communicators.factory",
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(modules)
