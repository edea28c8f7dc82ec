"""``python -m chainermn_ng`` runs programs as Python does, and ends failing jobs."""

from __future__ import annotations

import sys

import pytest
from helpers.jobs import run_command, run_job

# 10 s for the end, and as many for the start of Python on a busy machine.
LIMIT_S = 20.0
SHOW = """
import sys
print(sys.argv, repr(sys.path[0]), sys.modules["__main__"].__dict__ is globals())
print(sorted(globals()), __name__, __package__, globals().get("__file__"))
print(__spec__ and __spec__.name, globals().get("__cached__"))
"""


def launch(*args, n_ranks=None, **options):
    argv = ["-m", "chainermn_ng", *map(str, args)]
    if n_ranks is None:
        return run_command([sys.executable, *argv], **options)
    return run_job(n_ranks, argv, **options)


def plain(*args, **options):
    return run_command([sys.executable, *map(str, args)], **options)


def assert_same(launched, expected):
    assert launched.stdout == expected.stdout, launched.output
    assert launched.stderr == expected.stderr, launched.output
    assert launched.returncode == expected.returncode, launched.output


@pytest.fixture
def program(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SHOW)
    (package / "module.py").write_text(SHOW)
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    script.write_text(SHOW)
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        ["folder/script.py", "-m", "--flag", "x"],
        ["-m", "pkg.module", "a", "-c"],
        ["-m", "pkg", "a"],
        ["-c", SHOW, "a", "-h"],
        ["missing.py"],
        ["-m", "missing_module"],
        ["-m", "pkg.missing"],
        ["-c", "import sys; sys.exit(3)"],
        ["-c", "import sys; sys.exit('a message')"],
        ["-c", "import sys; sys.exit()"],
        ["-c", "raise SystemExit(256)"],
        ["-c", "x ="],
        ["-c", "import threading\nthreading.Thread(target=print, args=[1]).start()"],
    ],
)
def test_program_sees_what_plain_python_shows_it(program, args):
    options = {"cwd": program}
    assert_same(launch(*args, **options), plain(*args, **options))


def test_traceback_shows_the_program_only(program):
    (program / "fails.py").write_text("def f():\n    1 / 0\n\nf()\n")
    options = {"cwd": program}
    assert_same(launch("fails.py", **options), plain("fails.py", **options))


def test_folder_with_main_is_run(program):
    (program / "folder" / "__main__.py").write_text("import script\n")
    result = launch("folder", cwd=program)
    assert result.returncode == 0, result.output
    assert "folder" in result.stdout


def test_pickles_and_atexit_find_main_after_the_last_line(program):
    code = """
import atexit, pickle
class A: pass
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(A())))))
"""
    (program / "late.py").write_text(code)
    assert "__main__.A" in launch("late.py", cwd=program).stdout


def test_help_and_version():
    assert "mpiexec -n 4 python -m chainermn_ng" in launch("--help").stdout
    assert launch("--version").stdout.startswith("chainermn-ng ")


@pytest.mark.parametrize("args", [[], ["--nonsense"], ["-m"], ["-c"]])
def test_bad_command_line_gets_the_usage(args):
    result = launch(*args)
    assert result.returncode == 2, result.output
    assert "mpiexec -n 4 python -m chainermn_ng" in result.stderr


def test_old_name_gives_the_same_modules():
    code = """
import chainermn, chainermn_ng
import chainermn.global_except_hook as old
from chainermn import compat
from chainermn.compat import prepare_chainer
from chainermn_ng import global_except_hook as new
import chainermn_ng.compat, importlib
assert chainermn is chainermn_ng
assert old is new and compat is chainermn_ng.compat
assert importlib.import_module("chainermn.compat.fixes") is chainermn_ng.compat.fixes
assert new.__spec__.name == new.__name__ == "chainermn_ng.global_except_hook"
assert chainermn.__spec__.name == "chainermn_ng"
importlib.reload(new)
"""
    result = launch("-c", code)
    assert result.returncode == 0, result.output


def test_name_that_is_not_there_yet_says_so():
    result = launch("-c", "import chainermn.not_there")
    assert result.returncode == 1
    assert "has no module 'chainermn_ng.not_there'" in result.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_find_the_old_name_and_chainer(program, method):
    (program / "workers.py").write_text(
        f"""
import multiprocessing
import chainer
import chainermn

def work(x):
    return chainermn.__name__, chainer.__version__, x

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.map(work, [1]))
"""
    )
    result = launch("workers.py", cwd=program)
    assert result.stdout == "[('chainermn_ng', '7.8.1', 1)]\n", result.output


FAIL = """
import sys, threading, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    {failure}
MPI.COMM_WORLD.barrier()
"""


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("raise SystemExit(3)", 3, "sys.exit(3)"),
        ("sys.exit(256)", 1, "sys.exit(256)"),
        ("sys.exit('no data')", 1, "no data"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("threading.Thread(target=int, args='x').start(); time.sleep(50)", 1, "int()"),
        ("sys.excepthook = print; raise ValueError('broken')", 1, "broken"),
    ],
)
def test_failing_rank_ends_the_job(failure, status, text):
    result = launch("-c", FAIL.format(failure=failure), n_ranks=2)
    assert result.returncode == status, result.output
    assert result.seconds < LIMIT_S, result.output
    assert text in result.stderr, result.output
    assert "rank 1 of 2" in result.stderr, result.output
    assert result.stderr.count("Traceback") <= 1, result.output


def test_exit_with_a_status_before_mpi_starts_ends_the_job():
    code = """
import os, sys, time
if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == 1:
    sys.exit(3)
time.sleep(50)
"""
    result = launch("-c", code, n_ranks=2)
    assert result.returncode == 3, result.output
    assert result.seconds < LIMIT_S


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit()"])
def test_clean_end_stays_clean(end):
    code = f"import sys\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n{end}"
    result = launch("-c", code, n_ranks=2)
    assert result.returncode == 0, result.output
    assert result.stderr == "", result.output


def test_variable_turns_it_off():
    code = "import sys; from mpi4py import MPI; sys.exit(3)"
    env = {"CHAINERMN_NG_ABORT_ON_EXCEPTION": "0"}
    result = launch("-c", code, n_ranks=2, env=env)
    assert result.returncode == 3, result.output
    assert "chainermn_ng:" not in result.stderr


def test_a_forgotten_multiprocess_iterator_does_not_keep_the_program():
    # Python 3.13 waits for ever for threads that __del__ joins at the end.
    code = """
import chainermn_ng, chainer
iterator = chainer.iterators.MultiprocessIterator(list(range(8)), 2, n_processes=1)
print(len(iterator.next()))
"""
    result = run_job(1, ["-W", "ignore::DeprecationWarning", "-c", code], timeout_s=60)
    assert (result.returncode, result.stdout) == (0, "2\n"), result.output
