"""The graph of a model over all ranks, and the order of its messages.

Pure functions: a table of each rank's components in, a program for each rank out.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Component(NamedTuple):
    """A link and the ranks that it is connected with.

    Attributes:
        name: what it is, for errors.
        sources: ranks that its inputs come from; ``None``: the model's inputs.
        dests: ranks that its output goes to; ``None``: the model's output.
    """

    name: str
    sources: tuple[int, ...] | None
    dests: tuple[int, ...] | None


class Place(NamedTuple):
    """A component: its rank, and its number there."""

    rank: int
    index: int


class Edge(NamedTuple):
    """From the output of one component to input ``slot`` of another."""

    source: Place
    dest: Place
    slot: int


@dataclass(frozen=True)
class Step:
    """What a rank does next: compute a component, or move along an edge.

    Attributes:
        compute: number of the component, or ``None``.
        edge: what to send, receive or keep, or ``None``.
    """

    compute: int | None = None
    edge: Edge | None = None


def plan(table: Sequence[Sequence[Component]]) -> list[list[Step]]:
    """Return each rank's program.

    The components are put into one order in which each comes after those that its
    inputs come from and after the one added before it on its rank; each output is
    sent as soon as it is there. All ranks follow this one order, so no two wait for
    each other, however long the messages are.

    Args:
        table: for each rank its components, in the order in which they were added.

    Returns:
        For each rank its steps.

    Raises:
        ValueError: an edge of which the other end is missing, or a cycle; the text
            shows the graph.
    """
    edges = _matched_edges(table)
    programs: list[list[Step]] = [[] for _ in table]
    for place in _ordered(table, edges):
        programs[place.rank].append(Step(compute=place.index))
        for edge in edges[place]:
            step = Step(edge=edge)
            programs[place.rank].append(step)
            if edge.dest.rank != place.rank:
                programs[edge.dest.rank].append(step)
    return programs


def plan_alone(components: Sequence[Component], rank: int) -> list[Step]:
    """Return the program of one rank that does not know the others'.

    Each component receives, computes and sends, one after the other.

    Raises:
        ValueError: what the rank sends to itself it does not receive, or too early.
    """
    table: list[Sequence[Component]] = [() for _ in range(rank)]
    table.append(components)
    own = _edges_between(table, rank, rank)
    for edge in own:
        if edge.dest.index <= edge.source.index:
            raise ValueError(
                f"{_link(edge.dest)} receives what {_link(edge.source)} sends only "
                f"later.\n{describe(table)}"
            )
    kept = iter(own)
    steps = []
    for index, component in enumerate(components):
        here = Place(rank, index)
        # Which component of the other rank it is, is not known and does not matter.
        for slot, source in enumerate(component.sources or ()):
            if source != rank:
                steps.append(Step(edge=Edge(Place(source, 0), here, slot)))
        steps.append(Step(compute=index))
        for dest in component.dests or ():
            edge = next(kept) if dest == rank else Edge(here, Place(dest, 0), 0)
            steps.append(Step(edge=edge))
    return steps


def describe(table: Sequence[Sequence[Component]]) -> str:
    """Return the graph as text, one line for each component."""
    lines = ["The graph, each link with the ranks that it receives from and sends to:"]
    for rank, components in enumerate(table):
        for index, (name, sources, dests) in enumerate(components):
            came = "input" if sources is None else _ranks(sources)
            goes = "output" if dests is None else _ranks(dests)
            lines.append(f"  {_link(Place(rank, index))} ({name}): {came} -> {goes}")
    return "\n".join(lines)


def _matched_edges(table: Sequence[Sequence[Component]]) -> dict[Place, list[Edge]]:
    """Return the edges by source, in the order in which it sends along them."""
    by_ranks = {
        (source, dest): iter(_edges_between(table, source, dest))
        for source in range(len(table))
        for dest in range(len(table))
    }
    return {
        Place(rank, index): [
            next(by_ranks[rank, dest]) for dest in component.dests or ()
        ]
        for rank, components in enumerate(table)
        for index, component in enumerate(components)
    }


def _edges_between(
    table: Sequence[Sequence[Component]], source: int, dest: int
) -> list[Edge]:
    """Pair what one rank sends to another with what that one receives, in order."""
    sent = [
        Place(source, index)
        for index, component in enumerate(table[source])
        for rank in component.dests or ()
        if rank == dest
    ]
    received = [
        (Place(dest, index), slot)
        for index, component in enumerate(table[dest])
        for slot, rank in enumerate(component.sources or ())
        if rank == source
    ]
    if len(sent) != len(received):
        raise ValueError(
            f"rank {source} sends to rank {dest} {_times(len(sent))}, but rank {dest} "
            f"receives from rank {source} {_times(len(received))}.\n{describe(table)}"
        )
    return [
        Edge(place, where, slot)
        for place, (where, slot) in zip(sent, received, strict=True)
    ]


def _ordered(
    table: Sequence[Sequence[Component]], edges: dict[Place, list[Edge]]
) -> list[Place]:
    """Return all components in an order in which they can be computed.

    Those added early come early, so that ranks do not receive long before they must.
    """
    needs: dict[Place, set[Place]] = {place: set() for place in edges}
    for place in edges:
        if place.index > 0:
            needs[place].add(Place(place.rank, place.index - 1))
        for edge in edges[place]:
            needs[edge.dest].add(place)
    needed_by: dict[Place, list[Place]] = defaultdict(list)
    for place, others in needs.items():
        for other in others:
            needed_by[other].append(place)
    n_open = {place: len(others) for place, others in needs.items()}
    ready = [(place.index, place.rank) for place, n in n_open.items() if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        index, rank = heapq.heappop(ready)
        order.append(Place(rank, index))
        for place in needed_by[order[-1]]:
            n_open[place] -= 1
            if n_open[place] == 0:
                heapq.heappush(ready, (place.index, place.rank))
    if len(order) < len(needs):
        raise ValueError(_cycle_text(table, edges, needs, set(order)))
    return order


def _cycle_text(
    table: Sequence[Sequence[Component]],
    edges: dict[Place, list[Edge]],
    needs: dict[Place, set[Place]],
    done: set[Place],
) -> str:
    """Walk back from a component that cannot be computed until one comes again."""
    path = [min(place for place in needs if place not in done)]
    while path[-1] not in path[:-1]:
        path.append(min(place for place in needs[path[-1]] if place not in done))
    path = path[path.index(path[-1]) :]
    parts = []
    for place, other in itertools.pairwise(path):
        receives = any(edge.dest == place for edge in edges[other])
        why = "receives from" if receives else "was added after"
        parts.append(f"{_link(place)} {why} {_link(other)}")
    return f"a cycle: {', '.join(parts)}.\n{describe(table)}"


def _link(place: Place) -> str:
    return f"link {place.index} of rank {place.rank}"


def _ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
