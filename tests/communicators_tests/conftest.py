"""Fixtures: every communicator, on every pretended topology of the job's size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from communicators import (
    CommunicatorBase,
    TopologyError,
    available_communicators,
    create_communicator,
)

# Hosts x ranks, and unequal hosts, by number of ranks.
TOPOLOGIES = {
    1: ["1x1"],
    2: ["1x2", "2x1"],
    3: ["1x3", "3x1", "2+1"],
    4: ["1x4", "2x2", "4x1", "3+1", "a,b,a,b", "2+1+1"],
}

#: Those that must refuse unequal hosts, and those that must refuse several hosts.
NEEDS_UNIFORM = {"two_dimensional", "multi_ring"}
NEEDS_ONE_HOST = {"single_node"}


def may_refuse(name: str, topology: str) -> bool:
    """Tell whether a communicator has to refuse a topology."""
    unequal = "+" in topology
    several = not topology.startswith("1x")
    return (name in NEEDS_UNIFORM and unequal) or (name in NEEDS_ONE_HOST and several)


@pytest.fixture(params=available_communicators())
def comm(request: pytest.FixtureRequest) -> Iterator[CommunicatorBase]:
    """One communicator over all ranks, by name."""
    with create_communicator(request.param, timeout_s=60) as communicator:
        yield communicator


@pytest.fixture
def flat() -> Iterator[CommunicatorBase]:
    """One communicator, for what all of them share."""
    with create_communicator("flat", timeout_s=60) as communicator:
        yield communicator


def create_or_refuse(name: str, topology: str, **options: object) -> CommunicatorBase:
    """Create a communicator on a pretended topology; skip the pairs that must fail.

    A refusal that is due, and one that is not, are told apart here, so that no test
    passes by a communicator's refusing everything.
    """
    if may_refuse(name, topology):
        with pytest.raises(TopologyError, match=name):
            create_communicator(name, topology=topology, **options)
        pytest.skip(f"{name} refuses {topology}, as it must")
    return create_communicator(name, topology=topology, timeout_s=60, **options)
