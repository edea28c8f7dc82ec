"""The graph of a model over ranks: which are refused, and in what order it runs."""

import itertools

import pytest

from chainermn_ng.links.rank_graph import Component, Place, plan, plan_alone


def table_of(*ranks):
    """Return a table from ``(sources, dests)`` pairs; an integer is one rank."""

    def listed(ranks):
        return (ranks,) if isinstance(ranks, int) else ranks

    return [
        [
            Component(f"L{i}", listed(sources), listed(dests))
            for i, (sources, dests) in enumerate(pairs)
        ]
        for pairs in ranks
    ]


def run_with_blocking_messages(programs):
    """Run all programs, a send being over when it is received; return the order."""
    at = [0] * len(programs)
    order = []
    while True:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            step = program[at[rank]]
            if step.compute is not None:
                order.append(Place(rank, step.compute))
                at[rank] += 1
                moved = True
                continue
            ends = {step.edge.source.rank, step.edge.dest.rank}
            if all(
                at[end] < len(programs[end]) and programs[end][at[end]] == step
                for end in ends
            ):
                order.append(step.edge)
                for end in ends:
                    at[end] += 1
                moved = True
        if not moved:
            return order if all(map(len_is, at, programs)) else None


def len_is(n, program):
    return n == len(program)


GOOD = {
    "one rank": table_of([(None, None)]),
    "chain": table_of([(None, 1)], [(0, 2)], [(1, None)]),
    "there and back": table_of([(None, 1), (1, None)], [(0, 0)]),
    "branches": table_of([(None, (1, 2)), ((1, 2), None)], [(0, 0)], [(0, 0)]),
    "crossing": table_of([(None, 1), (1, None)], [(None, 0), (0, None)]),
    "ring": table_of(
        [(None, 1), (2, None)], [(None, 2), (0, None)], [(None, 0), (1, None)]
    ),
    "to itself": table_of([(None, (0, 1)), (0, 1)], [((0, 0), None)]),
    "twice": table_of([(None, (1, 1))], [((0, 0), None)]),
    "a rank without links": table_of([(None, 2)], [], [(0, None)]),
    "output in the middle": table_of([(None, None), (None, 1)], [(0, None)]),
    "two messages, two links": table_of(
        [(None, 1), (None, 1)], [(0, 1), (0, 1), ((1, 1), None)]
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_no_two_ranks_wait_for_each_other(name):
    table = GOOD[name]
    order = run_with_blocking_messages(plan(table))
    assert order is not None
    computed = [step for step in order if isinstance(step, Place)]
    assert sorted(computed) == [
        Place(rank, index)
        for rank, components in enumerate(table)
        for index in range(len(components))
    ]
    edges = [step for step in order if not isinstance(step, Place)]
    n_outputs = sum(len(c.dests or ()) for components in table for c in components)
    assert len(edges) == n_outputs == len({(e.dest, e.slot) for e in edges})
    for edge in edges:
        assert order.index(edge.source) < order.index(edge) < order.index(edge.dest)


@pytest.mark.parametrize("name", GOOD)
def test_messages_between_two_ranks_keep_their_order(name):
    """They have one tag, so the k-th that is sent is the k-th that is received."""
    for rank, program in enumerate(plan(GOOD[name])):
        for source, dest in itertools.permutations(range(len(GOOD[name])), 2):
            edges = [
                step.edge
                for step in program
                if step.edge
                and (step.edge.source.rank, step.edge.dest.rank) == (source, dest)
            ]
            assert [e.source for e in edges] == sorted(e.source for e in edges)
            assert [(e.dest, e.slot) for e in edges] == sorted(
                (e.dest, e.slot) for e in edges
            ), rank


@pytest.mark.parametrize(
    ("table", "texts"),
    [
        (
            table_of([(None, 1)], [(None, None)]),
            ["rank 0 sends to rank 1 once", "rank 1 receives from rank 0 0 times"],
        ),
        (
            table_of([(None, None)], [(0, None)]),
            ["rank 0 sends to rank 1 0 times", "rank 1 receives from rank 0 once"],
        ),
        (table_of([(None, 0)]), ["rank 0 sends to rank 0 once"]),
        (
            table_of([(1, 1)], [(0, 0)]),
            [
                "a cycle: link 0 of rank 0 receives from link 0 of rank 1, link 0 of "
                "rank 1 receives from link 0 of rank 0"
            ],
        ),
        (
            table_of([(1, None), (None, 1)], [(0, 0)]),
            ["a cycle", "link 1 of rank 0 was added after link 0 of rank 0"],
        ),
        (table_of([(0, None), (None, 0)]), ["a cycle"]),
    ],
)
def test_bad_graphs_are_shown(table, texts):
    with pytest.raises(ValueError, match="The graph") as caught:
        plan(table)
    for text in texts:
        assert text in str(caught.value)
    for rank, components in enumerate(table):
        for index in range(len(components)):
            assert f"\n  link {index} of rank {rank} (L{index}): " in str(caught.value)


def test_a_rank_alone_runs_link_by_link():
    (components,) = table_of([(1, (2, 0)), ((0, 1), None)])
    steps = [
        step.compute
        if step.edge is None
        else (step.edge.source.rank, step.edge.dest.rank)
        for step in plan_alone(components, 0)
    ]
    assert steps == [(1, 0), 0, (0, 2), (0, 0), (1, 0), 1]


@pytest.mark.parametrize("pairs", [[(0, None)], [(0, None), (None, 0)]])
def test_a_rank_alone_sees_its_own_mistakes(pairs):
    (components,) = table_of(pairs)
    with pytest.raises(ValueError, match="The graph"):
        plan_alone(components, 0)
