"""Groups, messages, splits, and the life of communicators."""

from __future__ import annotations

import pytest

from nccl_emulator.library import INVALID_ARGUMENT, INVALID_USAGE
from nccl_emulator.programs import groups


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 40_001])
def test_all_to_all_in_one_group(server, n_ranks, count):
    server.run(groups.all_to_all, n_ranks, count)


def test_messages_of_a_pair_keep_their_order(server):
    server.run(groups.several_messages_of_a_pair, 2)


def test_messages_outside_of_a_group(server):
    server.run(groups.lone_messages, 2)


def test_nested_groups_start_at_the_last_end(server):
    server.run(groups.mixed_group, 2)


def test_collectives_of_a_group_keep_their_order(server):
    server.run(groups.collectives_of_one_communicator, 3)


def test_an_error_inside_a_group_ends_it(server):
    codes = [INVALID_ARGUMENT, INVALID_ARGUMENT]
    assert server.run(groups.error_in_group, 2) == [codes] * 2


def test_half_of_an_own_message_is_refused(server):
    assert server.run(groups.half_of_an_own_message, 2) == [INVALID_USAGE] * 2


def test_a_communicator_destroyed_in_a_group_is_refused(server):
    assert server.run(groups.destroyed_in_group, 1) == [INVALID_ARGUMENT]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_inits_in_a_group_in_crossed_order(server, n_ranks):
    server.run(groups.inits_in_group, n_ranks)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_split_by_color_and_key(server, n_ranks):
    for rank, found in enumerate(server.run(groups.splits, n_ranks)):
        backwards = n_ranks - 1 - rank
        pair = [r for r in range(n_ranks) if r // 2 == rank // 2]
        expected = {
            "all": (rank, n_ranks),
            "reversed": (backwards, n_ranks),
            "parity": (rank // 2, len(range(rank % 2, n_ranks, 2))),
            "alone": (0, 1),
            "one left out": (rank - 1, n_ranks - 1) if rank else None,
            "nested": (max(pair) - rank, len(pair)),
        }
        assert found == expected


def test_splits_in_a_group_in_crossed_order(server):
    server.run(groups.splits_in_group, 2)


def test_each_rank_counts_as_having_a_device(server):
    assert server.run(groups.properties, 3) == [(rank, 3, rank) for rank in range(3)]


def test_init_all_is_for_one_device(server):
    assert server.run(groups.single_init_all, 1) == [(1, INVALID_USAGE)]


def test_nothing_is_left_of_a_communicator(server):
    assert server.run(groups.many_lives, 3) == [(0, 0, 0)] * 3


def test_a_forked_child_has_no_communicators(server):
    assert server.run(groups.child_of_fork, 2) == [INVALID_ARGUMENT] * 2
