"""Commands that run on several ranks: bad input ends all of them, told once."""

from __future__ import annotations

from typing import Any, NoReturn

import click

import communicators
from chainermn_ng import job_control

#: Exit statuses: something failed on the way; the input cannot be used.
FAILED, BAD_INPUT = 1, 2

#: What all ranks raise for one rank's bad input (see :meth:`CommunicatorBase.agree`).
SHARED_ERRORS = (
    communicators.CommunicatorError,
    OSError,
    TypeError,
    ValueError,
)


class RanksCommand(click.Command):
    """A command whose ranks meet before any of them leaves for a wrong argument.

    A rank that left alone would keep the others waiting: mpiexec does not end them
    before MPI has started.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if job_control.rank_and_size()[1] > 1:
                meet(error=ValueError(error.format_message()))
            raise


def meet(
    details: str = "", error: BaseException | None = None
) -> communicators.CommunicatorBase:
    """Start MPI, and let all ranks agree that their input is good. Collective.

    Args:
        details: what has to be equal on all ranks.
        error: why this rank cannot go on.

    Returns:
        A communicator of all ranks.

    Raises:
        SystemExit: some rank cannot go on, or has other input; on all ranks, with
            status 2, after one of them has said why.
    """
    try:
        comm = communicators.create_communicator("naive")
    except communicators.UnavailableError as failure:
        click.echo(f"Error: {failure}", err=True)
        raise SystemExit(BAD_INPUT) from failure
    try:
        comm.agree("the command line", details, error=error)
    except SHARED_ERRORS as failure:
        leave_together(failure, BAD_INPUT)
    return comm


def leave_together(error: BaseException, status: int) -> NoReturn:
    """Print an error that all ranks have, on one of them, and leave.

    Args:
        error: being handled; raised again if it is this rank's alone.
        status: exit status.

    Raises:
        SystemExit: with ``status``.
    """
    is_told_elsewhere = getattr(error, "is_told_elsewhere", None)
    if is_told_elsewhere is None:
        raise error
    if not is_told_elsewhere:
        click.echo(f"Error: {error}", err=True)
    raise SystemExit(status) from error
