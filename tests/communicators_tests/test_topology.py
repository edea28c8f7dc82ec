"""Topologies are values: no ranks are needed."""

from __future__ import annotations

import pytest

from communicators import Topology, TopologyError
from communicators.topology import (
    coordinates,
    default_dims,
    parse_dims,
    prime_factors,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("2x2", (0, 0, 1, 1)),
        ("1x4", (0, 0, 0, 0)),
        ("4x1", (0, 1, 2, 3)),
        ("3+1", (0, 0, 0, 1)),
        ("2+1+1", (0, 0, 1, 2)),
        ("a,b,a,b", (0, 1, 0, 1)),
        (" a, a, a, b ", (0, 0, 0, 1)),
    ],
)
def test_parse_reads_each_notation(text, hosts):
    assert Topology.parse(text, 4).hosts == hosts


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "0x4", "4x0", "3+0+1", "+", "a,,b,c", "2*2", "-2x-2"]
)
def test_parse_refuses_what_it_cannot_read(text):
    with pytest.raises(TopologyError, match="topology"):
        Topology.parse(text, 4)


@pytest.mark.parametrize("text", ["2x3", "3+2", "a,b"])
def test_parse_refuses_another_number_of_ranks(text):
    with pytest.raises(TopologyError, match="this job has 4"):
        Topology.parse(text, 4)


def test_ranks_of_interleaved_hosts():
    topology = Topology.parse("a,b,a,b", 4)
    assert [topology.intra_rank(r) for r in range(4)] == [0, 0, 1, 1]
    assert [topology.inter_rank(r) for r in range(4)] == [0, 1, 0, 1]
    assert [topology.intra_size(r) for r in range(4)] == [2, 2, 2, 2]
    assert [topology.position(r) for r in range(4)] == [0, 2, 1, 3]
    assert topology.ranks_of(1) == (1, 3)
    assert topology.n_hosts == 2


def test_unequal_hosts():
    topology = Topology.parse("3+1", 4)
    assert topology.host_sizes == (3, 1)
    assert not topology.is_uniform
    with pytest.raises(TopologyError, match=r"3\+1"):
        default_dims(topology)


def test_restrict_renumbers_hosts():
    assert Topology.parse("2x2", 4).restrict([2, 3]).hosts == (0, 0)
    assert Topology.parse("2x2", 4).restrict([3, 0]).hosts == (0, 1)


@pytest.mark.parametrize("text", ["2x2", "3+1", "h0,h1,h0,h1"])
def test_text_form_can_be_read_back(text):
    topology = Topology.parse(text, 4)
    assert Topology.parse(str(topology), 4) == topology


def test_coerce_takes_names_and_refuses_the_rest():
    assert Topology.coerce(["a", "a", "b"], 3).hosts == (0, 0, 1)
    with pytest.raises(TypeError, match="int"):
        Topology.coerce(4, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size", "dims"),
    [
        ("1x1", 1, (1,)),
        ("1x4", 4, (4,)),
        ("4x1", 4, (2, 2)),
        ("2x4", 8, (4, 2)),
        ("12x2", 24, (2, 2, 2, 3)),
        ("7x1", 7, (7,)),
    ],
)
def test_default_dims_are_ranks_a_host_and_prime_factors_of_hosts(text, size, dims):
    assert default_dims(Topology.parse(text, size)) == dims


def test_prime_factors():
    assert [prime_factors(n) for n in (1, 2, 12, 97)] == [[], [2], [2, 2, 3], [97]]


@pytest.mark.parametrize("value", ["4x3", (4, 3), "2x2x3", "1x12", [12]])
def test_dims_with_the_right_product(value):
    dims = parse_dims(value, 12)
    product = 1
    for p in dims:
        product *= p
    assert product == 12
    assert 1 not in dims


@pytest.mark.parametrize("value", ["4x4", (5,), "ax3", "", (-3, -4), (0, 12)])
def test_dims_with_another_product_are_refused(value):
    with pytest.raises(TopologyError, match="dims"):
        parse_dims(value, 12)


def test_coordinates_are_mixed_radix_digits_with_dimension_0_fastest():
    places = [coordinates(i, (2, 3)) for i in range(6)]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
