"""The commands of ``chainermn-ng``, each imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click

from communicators import __version__
from communicators.call_place import look_through

#: Command -> module and object. A command that needs no MPI does not wait for it.
COMMANDS = {
    "bench": "chainermn_ng.cli.bench:bench",
    "plan": "chainermn_ng.cli.plan:plan",
    "timeline": "chainermn_ng.cli.timeline:timeline",
}

#: What ``--help`` says of each, so that it need not be imported for that.
SUMMARIES = {
    "bench": "Measure communicators on these ranks (under mpiexec).",
    "plan": "Predict step times and efficiency for hosts and networks.",
    "timeline": "Turn recorded training steps into a trace for Perfetto.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported at their first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, name = COMMANDS[cmd_name].partition(":")
        command: Any = getattr(importlib.import_module(module_name), name)
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES[name]) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    __version__, "-V", "--version", message="chainermn-ng %(version)s"
)
def chainermn_ng() -> None:
    """Multi-process training for Chainer: measure, plan and look at it.

    Training programs are started by "mpiexec -n 4 python -m chainermn_ng train.py".
    """


def run(args: list[str] | None) -> int:
    """Run the command that ``args`` name; return the exit status."""
    # There is no program of the user's whose line an error could name.
    for package in ("__main__", "click"):
        look_through(package)
    try:
        status = chainermn_ng.main(
            args, prog_name="chainermn-ng", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as error:
        # What click makes of an interrupt: the other ranks are to end, too.
        raise KeyboardInterrupt from error
    return status if isinstance(status, int) else 0
