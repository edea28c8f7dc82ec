"""Mistakes of ranks, and ranks that wait for each other, leave or die."""

from __future__ import annotations

import pytest

from nccl_emulator.library import (
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    REMOTE_ERROR,
    SYSTEM_ERROR,
)
from nccl_emulator.programs import failures

#: Deadlocks are looked for earlier, and inits given up earlier, than by default.
SOON = {"NCCL_EMULATOR_DEADLOCK_S": "0.2", "NCCL_EMULATOR_INIT_TIMEOUT_S": "1"}
#: Seconds within which an error has to be there, on a busy machine.
PROMPT_S = 8.0


def results(outcomes, ranks=None):
    """Return the values of the ranks, none of which may have failed or hung."""
    chosen = outcomes if ranks is None else [outcomes[rank] for rank in ranks]
    for outcome in chosen:
        assert outcome.error is None, (outcome.error, outcome.stderr)
    return [outcome.value for outcome in chosen]


def reports(outcomes) -> list[str]:
    """Return the lines that the library wrote on stderr, of all ranks."""
    lines = [line for outcome in outcomes for line in outcome.stderr.splitlines()]
    return [line for line in lines if line.startswith("NCCL emulator: ")]


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_opposite_orders_are_reported(server, n_ranks):
    outcomes = server.outcomes(failures.circle, n_ranks, env=SOON)
    for (code, text, seconds), after in results(outcomes):
        assert code == INVALID_USAGE
        assert after == (INVALID_USAGE, INVALID_USAGE)
        assert seconds < PROMPT_S
        assert f"deadlock: {n_ranks} threads wait for each other" in text
        # Both sides: as many communicators, operations and ranks as there are ranks.
        waits = text.split(";")
        names = {wait.split("communicator ")[1].split()[0] for wait in waits}
        assert len(names) == len(waits) == n_ranks
        assert all("AllReduce(count 4, float32, sum) number 0" in w for w in waits)
        assert all(" as rank " in w and " waits for rank " in w for w in waits)
    (report,) = reports(outcomes)
    assert report.endswith(results(outcomes)[0][0][1])


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_opposite_orders_in_a_group_are_right(server, n_ranks):
    server.run(failures.circle_in_group, n_ranks, env=SOON)


@pytest.mark.parametrize(
    "program", [failures.two_sends, failures.send_against_collective]
)
def test_calls_that_never_meet_are_reported(server, program):
    outcomes = server.outcomes(program, 2, env=SOON)
    for code, text, seconds in results(outcomes):
        assert (code, seconds < PROMPT_S) == (INVALID_USAGE, True)
        assert "Send(count 3, float64, to rank 1)" in text
    assert len(reports(outcomes)) == 1


@pytest.mark.parametrize(
    ("program", "n_ranks"),
    [
        (failures.slow_rank, 3),
        (failures.crossed_threads, 2),
        (failures.stopped_rank, 2),
    ],
)
def test_a_slow_rank_is_no_deadlock(server, program, n_ranks):
    env = {"NCCL_EMULATOR_DEADLOCK_S": "0.1"}
    outcomes = server.outcomes(program, n_ranks, env=env)
    results(outcomes)
    assert reports(outcomes) == []


@pytest.mark.parametrize("what", failures.MISMATCHES)
def test_a_mismatch_is_reported_with_both_sides(server, what):
    outcomes = server.outcomes(failures.mismatch, 3, failures.MISMATCHES[what])
    texts = set()
    for (code, text, seconds), later in results(outcomes):
        assert (code, later) == (INVALID_USAGE, (INVALID_USAGE, INVALID_USAGE))
        assert seconds < PROMPT_S
        texts.add(text)
    (text,) = texts
    assert "collective number 1 is " in text
    assert " on rank 2 of 3" in text
    first, second = text.split(" is ", 1)[1].split(" and ")
    assert first.split(" on rank")[0] != second.split(" on rank")[0]
    assert len(reports(outcomes)) == 1


@pytest.mark.parametrize("what", ["count", "type"])
def test_a_message_of_another_kind_is_reported(server, what):
    outcomes = server.outcomes(failures.message_mismatch, 2, what)
    for code, text, _ in results(outcomes):
        assert code == INVALID_USAGE
        assert "Send(count 4, float64, to rank 1) on rank 0 and Recv(count " in text


@pytest.mark.parametrize("how", ["killed", "ended", "destroyed", "aborted"])
def test_a_rank_that_is_gone_is_an_error_of_the_others(server, how):
    outcomes = server.outcomes(failures.die_and_wait, 3, how)
    for (code, text, seconds), later in results(outcomes, [0, 1]):
        assert (code, later) == (REMOTE_ERROR, (REMOTE_ERROR, REMOTE_ERROR))
        assert seconds < PROMPT_S
        gone = "has left" if how in ("destroyed", "aborted") else "has died"
        assert text.startswith("rank 2 of 3")
        assert gone in text


def test_a_split_without_a_rank_that_has_died_is_an_error(server):
    outcomes = server.outcomes(failures.die_and_wait, 3, "killed", True)
    for (code, text, _), later in results(outcomes, [0, 1]):
        assert (code, later) == (REMOTE_ERROR, (REMOTE_ERROR, REMOTE_ERROR))
        assert "Split(color 0, key 0)" in text


def test_init_without_all_ranks_gives_up(server):
    outcomes = server.outcomes(failures.die_before_init, 3, env=SOON)
    for code, text, _ in results(outcomes, [0, 1]):
        assert code == SYSTEM_ERROR
        assert text.endswith("these have not joined within 1 s: 2")


def test_a_rank_that_dies_during_init_is_an_error_of_the_others(server):
    outcomes = server.outcomes(failures.die_during_init, 3)
    assert outcomes[1].exit_code == -9
    assert results(outcomes, [0])[0][0] == REMOTE_ERROR
    # The id went with the process that gave up.
    assert results(outcomes, [2])[0][0] == SYSTEM_ERROR


def test_the_id_of_a_dead_process_is_refused(server):
    outcomes = server.outcomes(failures.id_of_dead_process, 2)
    code, text, _ = results(outcomes, [1])[0]
    assert code == SYSTEM_ERROR
    assert "is not there" in text


def test_an_id_makes_one_communicator(server):
    for code, text, _ in server.run(failures.used_id, 2):
        assert code == SYSTEM_ERROR
        assert "no longer, valid" in text


@pytest.mark.parametrize(
    ("what", "code"), [("size", INVALID_ARGUMENT), ("rank", INVALID_USAGE)]
)
def test_ranks_that_disagree_at_init(server, what, code):
    found = [value[0] for value in server.run(failures.wrong_inits, 3, what)]
    assert found[0] == code
    # Who comes after the maker of the id has given up finds no id.
    assert set(found) <= {code, SYSTEM_ERROR}


def test_a_rank_that_has_done_its_part_may_leave(server):
    assert server.run(failures.leave_early, 2) == [True, True]


@pytest.mark.parametrize("call", ["collective", "send", "split", "group"])
def test_abort_ends_a_waiting_call(server, call):
    (code, text, seconds), after = server.run(failures.abort_while_waiting, 2, call)[0]
    assert code == INTERNAL_ERROR
    assert "was aborted" in text
    assert seconds < PROMPT_S
    assert after == (INVALID_ARGUMENT, INVALID_ARGUMENT)


def test_wrong_arguments_are_refused_and_leave_no_trace(server):
    usage = {"overlap", "to oneself", "group end"}
    for found in server.run(failures.wrong_arguments, 2):
        for what, code in found.items():
            assert (what, code) == (what, INVALID_USAGE if what in usage else 4)


def test_calls_after_finalize_are_refused(server):
    assert server.run(failures.finalized, 2) == [INVALID_USAGE] * 2
