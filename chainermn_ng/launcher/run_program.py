"""Run a program inside this process the way ``python`` itself would start it.

``runpy.run_path`` and ``run_module`` put a temporary ``__main__`` in place and take it
away when the program's last line is done; threads, atexit functions and pickles then
look for names in the wrong module. Here ``__main__`` stays.
"""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any


class UsageError(Exception):
    """The command line names no program."""


def run_program(args: list[str]) -> None:
    """Run ``script [args]``, ``-m module [args]``, ``-c code [args]`` or ``- [args]``.

    Sets ``sys.argv``, ``sys.path[0]`` and ``__main__``; errors of the program pass.

    Raises:
        UsageError: no program, or an unknown option before it.
    """
    if not args:
        raise UsageError("no program to run")
    first, rest = args[0], args[1:]
    if first in ("-m", "-c") and not rest:
        raise UsageError(f"argument expected for the {first} option")
    if first == "-m":
        _run_module(rest[0], rest[1:])
    elif first == "-c":
        _run_text(rest[0], "<string>", ["-c", *rest[1:]])
    elif first == "-":
        _run_text(sys.stdin.read(), "<stdin>", ["-", *rest])
    elif first.startswith("-"):
        raise UsageError(f"unknown option: {first}")
    else:
        _run_script(first, rest)


def _set_first_path(entry: str) -> None:
    # ``python -P`` and PYTHONSAFEPATH leave out the entry that is replaced here.
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = entry


def _run(code: CodeType, **attributes: Any) -> None:
    main = ModuleType("__main__")
    vars(main).update({"__annotations__": {}, **attributes})
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _run_text(text: str, file_name: str, argv: list[str]) -> None:
    sys.argv[:] = argv
    _set_first_path("")
    code = compile(text, file_name, "exec", dont_inherit=True)
    _run(code, __loader__=BuiltinImporter)


def _run_script(path: str, rest: list[str]) -> None:
    sys.argv[:] = [path, *rest]
    if os.path.isdir(path) or path.endswith((".zip", ".pyz", ".pyc")):
        # Python puts the folder or archive itself on sys.path; runpy does so in front
        # of the entry for this package, which Python would not have.
        if not sys.flags.safe_path and sys.path:
            del sys.path[0]
        runpy.run_path(path, run_name="__main__")
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    path = os.path.join(os.getcwd(), path)  # in __file__ and tracebacks, too
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        # The words and the status of ``python missing.py``.
        print(
            f"{sys.executable}: can't open file {path!r}: "
            f"[Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(2)
    code = compile(source, path, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", path)
    _run(code, __file__=path, __loader__=loader, __cached__=None)


def _run_module(name: str, rest: list[str]) -> None:
    # ``-m`` searches from the working directory, which is sys.path[0] already.
    sys.argv[:] = ["-m", *rest]
    spec = _find_module(name)
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if code is None:
        _no_module(name, f"No code object available for {spec.name}")
    sys.argv[0] = spec.origin or name
    _run(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _find_module(name: str) -> ModuleSpec:
    """Find a module, or the ``__main__`` of a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Also raised by a parent package that fails to import something else.
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        _no_module(name, f"No module named {name}")
    return spec


def _no_module(name: str, text: str) -> None:
    print(f"{sys.executable}: {text}", file=sys.stderr)
    sys.exit(1)
