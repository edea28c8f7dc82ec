"""Run a Chainer or ChainerMN program on ranks: python -m chainermn_ng.

    mpiexec -n 4 python -m chainermn_ng script.py [args]
    mpiexec -n 4 python -m chainermn_ng -m module [args]
    mpiexec -n 4 python -m chainermn_ng -c code [args]
    mpiexec -n 4 python -m chainermn_ng - [args]            (code from standard input)
    mpiexec -n 4 python -m chainermn_ng --cpu-fallback script.py [args]

The program runs as plain python would run it. Besides, Chainer 7.8.1 can be imported,
"import chainermn" gives this package, and a rank that fails ends the job: by an
uncaught exception in any thread, or by sys.exit with another status than 0. With
--cpu-fallback, programs that ask for a GPU run on the CPU where there is none.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import TracebackType

from chainermn_ng import (
    compat,
    cpu_fallback,
    exit_hooks,
    global_except_hook,
    job_control,
)
from chainermn_ng.devices import why_no_gpu
from chainermn_ng.launcher import worker_processes
from chainermn_ng.launcher.old_name import answer_old_name
from chainermn_ng.launcher.run_program import UsageError, run_program

_USAGE = __doc__ or ""
_HELP_OPTIONS = ("-h", "--help")
_VERSION_OPTIONS = ("-V", "--version")


def main(args: list[str] | None = None) -> None:
    """Run the program that ``args`` name (default: ``sys.argv[1:]``).

    Raises:
        SystemExit: always in one process, with the status that plain Python gives. On
            several ranks a failure ends the job before.
    """
    args = sys.argv[1:] if args is None else list(args)
    if args and args[0] in _HELP_OPTIONS:
        print(_USAGE)
        return
    if args and args[0] in _VERSION_OPTIONS:
        print(f"chainermn-ng {_version()}")
        return
    compat.prepare_chainer()
    if args and args[0] == cpu_fallback.OPTION:
        # In the environment, so that worker processes have it too.
        os.environ[cpu_fallback.VARIABLE] = "1"
        cpu_fallback.prepare(why_no_gpu)
        del args[0]
    answer_old_name()
    worker_processes.prepare_workers()
    global_except_hook.add_hook()
    try:
        run_program(args)
    except UsageError as error:
        print(f"{error}\n{_USAGE}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as error:
        _leave(error)
    except BaseException as error:
        _fail(error)


def _leave(error: SystemExit) -> None:
    """Leave as the program asked; end the job if that is a failure."""
    status = exit_hooks.status_of(error.code)
    if status == 0:
        raise error
    if not isinstance(error.code, int):
        job_control.flush_output()
        print(error.code, file=sys.stderr)
    if global_except_hook.enabled():
        job_control.end_job(status, exit_hooks.text_of(error.code))
    sys.exit(error.code if isinstance(error.code, int) else status)


def _fail(error: BaseException) -> None:
    """Show the error as Python would; end the job."""
    trace = _program_part(error.__traceback__)
    if isinstance(error, KeyboardInterrupt) and job_control.rank_and_size()[1] < 2:
        raise error  # Python then ends by the signal, as shells expect
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    # Only if the program has replaced our hook does this line run on several ranks.
    global_except_hook.end_job_for(type(error), error)
    sys.exit(1)


def _program_part(trace: TracebackType | None) -> TracebackType | None:
    """Drop the launcher's own frames: they tell a user nothing about the program."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (
        __name__,
        run_program.__module__,
    ):
        trace = trace.tb_next
    return trace


def _version() -> str:
    try:
        return metadata.version("chainermn-ng")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its sources)"
