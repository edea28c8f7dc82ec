"""The cost model: published figures, its own laws, and the engine's choices."""

from __future__ import annotations

import dataclasses
import math

import pytest
from helpers import published_scaling
from hypothesis import given
from hypothesis import strategies as st

from communicators.cost_model import MODELLED, Cluster, Phases, allreduce_s, multi_ring
from communicators.cost_presets import PRESETS
from communicators.cost_search import (
    Training,
    best_choice,
    best_dims,
    factorizations,
)
from communicators.registry import known_communicators
from communicators.topology import Topology, default_dims

FIGURES = [
    *published_scaling.times_of_chainermn_1(),
    *published_scaling.efficiencies_of_chainermn(),
    *published_scaling.efficiencies_of_ddl(),
    *published_scaling.efficiencies_of_horovod(),
    *published_scaling.times_of_nccl_569(),
]
GPU_PRESETS = [name for name, preset in PRESETS.items() if preset.device == "gpu"]

clusters = st.builds(
    Cluster,
    hosts=st.integers(1, 12),
    ranks_per_host=st.integers(1, 8),
    intra_bytes_s=st.floats(1e9, 1e11),
    inter_bytes_s=st.floats(1e8, 1e10),
    nics=st.integers(1, 4),
    shared_memory=st.booleans(),
    is_striped=st.booleans(),
)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.label)
def test_a_published_figure_is_met_within_a_tenth(figure):
    assert abs(figure.error) < 0.1, figure


def test_every_modelled_communicator_exists_and_others_are_refused():
    assert set(MODELLED) <= set(known_communicators())
    with pytest.raises(ValueError, match=r"'dummy'.*flat, hierarchical, multi_ring"):
        allreduce_s("dummy", PRESETS["h100"].cluster, 1.0)


@pytest.mark.parametrize("preset", GPU_PRESETS)
@pytest.mark.parametrize("nbytes", [1e6, 25e6, 102e6, 1e9])
def test_the_model_and_the_engine_choose_the_same_factors(preset, nbytes):
    cluster = PRESETS[preset].cluster
    topology = Topology.parse(f"{cluster.hosts}x{cluster.ranks_per_host}", cluster.size)
    assert best_dims(cluster, nbytes) == default_dims(topology)


def test_larger_factors_pay_where_calls_cost_more_than_latency():
    cluster = dataclasses.replace(PRESETS["ddl-2017"].cluster, call_s=2.5 * 15e-6)
    assert best_dims(cluster, 1e6) == (4, 4, 4, 4)


@given(st.integers(1, 400))
def test_factorizations_have_the_product_and_none_twice(n):
    found = list(factorizations(n))
    assert all(math.prod(dims) == n for dims in found)
    assert all(list(dims) == sorted(dims) and 1 not in dims for dims in found)
    assert len(set(found)) == len(found)
    assert (n,) in found or n == 1


@given(clusters, st.floats(1e3, 1e9))
def test_factors_move_the_same_bytes_whatever_they_are(cluster, nbytes):
    """With no latency only the bandwidth is left: it telescopes."""
    free = dataclasses.replace(
        cluster, intra_latency_s=0.0, inter_latency_s=0.0, call_s=0.0
    )
    g = cluster.ranks_per_host
    times = [
        multi_ring(free, nbytes, (g, *dims)).inter_s
        for dims in factorizations(cluster.hosts)
    ]
    assert times == pytest.approx([times[0]] * len(times))


@given(clusters, st.floats(1e3, 1e9))
def test_two_dimensional_is_multi_ring_of_two_dimensions(cluster, nbytes):
    """But for calls: its exchange between hosts is one, the rings' are two."""
    free = dataclasses.replace(cluster, call_s=0.0)
    assert allreduce_s("two_dimensional", free, nbytes) == pytest.approx(
        allreduce_s("multi_ring", free, nbytes)
    )


@given(clusters, st.floats(1e3, 1e9))
def test_one_dimension_is_a_flat_ring_of_one_flow(cluster, nbytes):
    one_flow = dataclasses.replace(
        cluster, call_s=0.0, is_striped=False, shared_memory=False
    )
    assert allreduce_s("flat", one_flow, nbytes) == pytest.approx(
        multi_ring(one_flow, nbytes, (cluster.size,)).pipelined_s(1)
    )


@given(clusters, st.floats(1e3, 1e9), st.sampled_from(MODELLED))
def test_more_bytes_and_a_slower_network_never_take_less(cluster, nbytes, name):
    if name == "single_node":
        cluster = dataclasses.replace(cluster, hosts=1)
    slower = dataclasses.replace(
        cluster,
        intra_bytes_s=cluster.intra_bytes_s / 2,
        inter_bytes_s=cluster.inter_bytes_s / 2,
    )
    seconds = allreduce_s(name, cluster, nbytes)
    assert seconds <= allreduce_s(name, cluster, 2 * nbytes)
    assert seconds <= allreduce_s(name, slower, nbytes)


@given(clusters, st.floats(1e3, 1e9), st.sampled_from(["multi_ring", "hierarchical"]))
def test_the_best_pieces_are_no_worse_than_one(cluster, nbytes, name):
    choice = best_choice(name, cluster, nbytes)
    whole = best_choice(name, cluster, nbytes, bucket_bytes=2**40)
    assert whole.n_pieces == 1
    assert choice.seconds <= whole.seconds


def test_pieces_hide_the_faster_link():
    assert Phases(2.0, 3.0).pipelined_s(1) == 5.0
    assert Phases(2.0, 3.0).pipelined_s(4) == 5.0 + 3 * 3.0


def test_common_memory_takes_two_steps_whatever_the_number_of_ranks():
    cluster = Cluster(
        1, 8, 5e9, 1e9, intra_latency_s=1e-6, call_s=0.0, shared_memory=True
    )
    assert allreduce_s("flat", cluster, 0.0) == pytest.approx(2e-6)
    assert allreduce_s("flat", cluster, 5e9) == pytest.approx(2.0, rel=1e-5)
    # Eight ranks that share 8 GB/s get 1 GB/s each.
    narrow = dataclasses.replace(cluster, memory_bytes_s=8e9)
    assert allreduce_s("flat", narrow, 5e9) == pytest.approx(10.0, rel=1e-5)


def test_one_rank_has_nothing_to_wait_for():
    cluster = Cluster(1, 1, 1e9, 1e9)
    assert {allreduce_s(name, cluster, 1e8) for name in MODELLED} == {0.0}


def test_naive_pays_the_latency_for_each_array():
    cluster = PRESETS["cpu-1gbe"].cluster
    once, often = (allreduce_s("naive", cluster, 0.0, n_arrays=n) for n in (1, 161))
    assert often == pytest.approx(161 * once)
    assert once == allreduce_s("flat", cluster, 0.0)


def test_what_does_not_fit_is_refused():
    cluster = Cluster(2, 4, 1e9, 1e9)
    with pytest.raises(ValueError, match=r"dims \(3, 2\): their product is not 8"):
        multi_ring(cluster, 1.0, (3, 2))
    with pytest.raises(ValueError, match="3 ranks, 1 apart, does not fit hosts of 4"):
        multi_ring(Cluster(3, 4, 1e9, 1e9), 1.0, (3, 4))
    with pytest.raises(ValueError, match="one host, not on 2"):
        allreduce_s("single_node", cluster, 1.0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hosts", 0, "hosts 0: expected a whole number"),
        ("nics", 1.5, "nics 1.5: expected a whole number"),
        ("inter_bytes_s", 0.0, "expected more than 0 bytes/s"),
        ("flow_bytes_s", math.nan, "expected more than 0 bytes/s"),
        ("inter_latency_s", -1e-6, "expected 0 seconds or more"),
    ],
)
def test_a_cluster_has_sensible_numbers(field, value, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(Cluster(2, 4, 1e9, 1e9), **{field: value})


def test_a_step_hides_what_the_backward_pass_covers():
    alone = Training(compute_s=0.3)
    assert alone.step_s(0.1, 8) == pytest.approx(0.4)
    assert dataclasses.replace(alone, overlap=1.0).step_s(0.1, 8) == pytest.approx(0.3)
    half = dataclasses.replace(alone, overlap=0.5, pack_s=0.01)
    assert half.step_s(0.25, 8) == pytest.approx(0.3 + 0.01 + 0.15)
    assert half.efficiency(0.25, 8) == pytest.approx(0.3 / 0.46)
    # The slowest of one rank is that rank.
    assert dataclasses.replace(alone, jitter=0.1).step_s(0.0, 1) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="overlap 2"):
        Training(compute_s=1.0, overlap=2)
