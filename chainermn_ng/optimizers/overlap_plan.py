"""In which groups the gradients of a model travel, and when: the same on all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import chainer

from chainermn_ng.backward import functions_of, order_of_completion
from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.optimizers.gradient_groups import (
    SMALLEST_LIMIT,
    cut_into_groups,
    default_overlap_bytes,
)
from chainermn_ng.optimizers.overlap import Parameters, go_by_nccl, is_collective

_logger = logging.getLogger("chainermn_ng")


@dataclass(frozen=True)
class Plan:
    """How the gradients of one set of parameters travel.

    Attributes:
        names: paths of the parameters, sorted.
        groups: the paths of each group, sorted; the groups in the order in which they
            travel.
        in_background: whether they do so during the backward pass.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    in_background: bool = False

    def of(self, parameters: Parameters) -> list[Parameters]:
        """Return the parameters in groups."""
        by_name = dict(parameters)
        return [[(name, by_name[name]) for name in group] for group in self.groups]


@dataclass(frozen=True)
class Told:
    """What a rank tells the others when they plan.

    Attributes:
        order: indices of the parameters that its backward pass reaches, in the order of
            their completion; ``None`` if it has no graph.
        thread_level: of its MPI.
        by_nccl: whether the gradients travel by NCCL.
        is_collective: whether the backward pass itself meets other ranks.
        host: number of its machine.
        cores: bits of those that it may run on.
    """

    order: tuple[int, ...] | None
    thread_level: str
    by_nccl: bool
    is_collective: bool
    host: int
    cores: int


class Planner:
    """Plans for one optimizer, and keeps the plan while the parameters are the same.

    Args:
        overlap: ``"auto"``, ``True`` or ``False``.
        overlap_bytes: see :func:`cut_into_groups`; ``None`` for
            :func:`default_overlap_bytes`.

    Raises:
        ValueError: another value.
    """

    def __init__(
        self, overlap: bool | str = "auto", overlap_bytes: int | None = None
    ) -> None:
        if not isinstance(overlap, bool) and overlap != "auto":
            raise ValueError(f"overlap={overlap!r}: expected 'auto', True or False")
        is_number = isinstance(overlap_bytes, int) and overlap_bytes >= 1
        if overlap_bytes is not None and not is_number:
            raise ValueError(
                f"overlap_bytes={overlap_bytes!r}: expected None, or 1 or more"
            )
        self.overlap = overlap
        self.overlap_bytes = overlap_bytes
        self._plan: Plan | None = None

    def forget(self) -> None:
        """Plan anew: for another model."""
        self._plan = None

    def plan(
        self,
        comm: ChainerCommunicator,
        parameters: Parameters,
        loss: chainer.Variable | None,
        label: str,
    ) -> Plan:
        """Return the plan for these parameters.

        Collective if it has to be made and the parameters are enough for two groups.

        Args:
            comm: whose ranks take part.
            parameters: initialised ones with their paths, sorted.
            loss: of this rank, before its backward pass; ``None`` if it has none.
            label: names the operation in errors.
        """
        names = tuple(name for name, _ in parameters)
        if self._plan is None or self._plan.names != names:
            # A model of one group needs no order.
            nbytes = sum(parameter.raw_array.nbytes for _, parameter in parameters)
            if comm.size == 1 or nbytes <= (self.overlap_bytes or SMALLEST_LIMIT):
                self._plan = Plan(names, (names,))
            else:
                self._plan = self._made(comm, parameters, loss, label)
        return self._plan

    def _made(
        self,
        comm: ChainerCommunicator,
        parameters: Parameters,
        loss: chainer.Variable | None,
        label: str,
    ) -> Plan:
        settings = f"overlap={self.overlap}, overlap_bytes={self.overlap_bytes}"
        comm.engine.agree(label, settings)
        table = comm.allgather_obj(_told(comm, parameters, loss))
        order = common_order(table, len(parameters))
        sizes = [parameters[i][1].raw_array.nbytes for i in order]
        limit = self.overlap_bytes or default_overlap_bytes(sum(sizes))
        names = tuple(name for name, _ in parameters)
        groups = tuple(
            tuple(sorted(names[order[i]] for i in group))
            for group in cut_into_groups(sizes, limit)
        )
        why_not = None
        if self.overlap == "auto":
            why_not = reason_against(table, len(groups), comm.inter_size)
        elif not self.overlap or len(groups) == 1:
            why_not = "overlap=False" if not self.overlap else "there is one group"
        if comm.rank == 0:
            _logger.info(
                "%s: %d gradients, %d bytes, in %d groups, %s",
                label,
                len(names),
                sum(sizes),
                len(groups),
                f"after the backward pass ({why_not})"
                if why_not
                else "during the backward pass",
            )
        return Plan(names, groups, why_not is None)


def common_order(table: Sequence[Told], n_parameters: int) -> list[int]:
    """Return the order of completion on the lowest rank that knows one.

    Pure. Parameters that its backward pass does not reach come last: they may be
    hidden in functions that run one of their own.
    """
    told = [entry.order for entry in table if entry.order is not None]
    order = list(told[0]) if told else []
    reached = set(order)
    return order + [i for i in range(n_parameters) if i not in reached]


def reason_against(table: Sequence[Told], n_groups: int, n_hosts: int) -> str | None:
    """Return why ``overlap="auto"`` is off, or ``None``.

    Pure: all ranks call it on the same table.

    Args:
        table: what each rank has told.
        n_groups: of gradients.
        n_hosts: of the communicator's topology, which may be a pretended one.
    """
    if n_groups == 1:
        return "there is one group"
    levels = {entry.thread_level for entry in table} - {"multiple"}
    if levels:
        return f"MPI was started with MPI_THREAD_{min(levels).upper()}"
    if any(entry.by_nccl for entry in table):
        # A default is not to be what nobody has seen at work.
        return "by NCCL it has not been run on a GPU yet; overlap=True turns it on"
    if n_hosts > 1:
        return None
    # Within one host the averaging is work for the cores that compute the gradients.
    for host in {entry.host for entry in table}:
        here = [entry for entry in table if entry.host == host]
        cores = 0
        for entry in here:
            cores |= entry.cores
        if cores.bit_count() < 2 * len(here):
            return f"{len(here)} ranks of one host on {cores.bit_count()} cores"
    return None


def _told(
    comm: ChainerCommunicator, parameters: Parameters, loss: chainer.Variable | None
) -> Told:
    order = None
    if loss is not None:
        index = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
        found = (index.get(id(leaf)) for leaf in order_of_completion(loss))
        order = tuple(i for i in found if i is not None) or None
    return Told(
        order=order,
        thread_level=comm.engine.thread_level,
        by_nccl=go_by_nccl(parameters),
        is_collective=any(map(is_collective, functions_of(loss))),
        host=comm.engine.real_host,
        cores=_cores(),
    )


def _cores() -> int:
    """Return the cores that this process may run on, as bits of a number."""
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1
