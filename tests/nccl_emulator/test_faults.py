"""Faults by order of the environment, delays, and the log."""

from __future__ import annotations

import re

import pytest

from nccl_emulator.library import INTERNAL_ERROR, REMOTE_ERROR
from nccl_emulator.programs import faults

FAIL = "NCCL_EMULATOR_FAIL"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("AllReduce:2:2", [[0, 2, 0], [0, 2, 0]]),
        ("AllReduce:1:3,AllReduce:3:1", [[3, 0, 1], [3, 0, 1]]),
        ("AllReduce:2:6@1", [[0, 0, 0], [0, 6, 0]]),
        ("AllReduce:1:2@0,AllReduce:3:5@1", [[2, 0, 0], [0, 0, 5]]),
        ("Reduce:1:2,AllGather:1:2", [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_the_call_that_is_named_fails(server, order, expected):
    assert server.run(faults.three_calls, 2, env={FAIL: order}) == expected


#: The call that fails, counted as each_call() makes them.
EACH = {"GetUniqueId": 1, "Init": 1, "GroupEnd": 2} | dict.fromkeys(
    [
        "Send",
        "Recv",
        "AllReduce",
        "Reduce",
        "Broadcast",
        "ReduceScatter",
        "AllGather",
        "Split",
    ],
    1,
)


@pytest.mark.parametrize("name", EACH)
def test_every_kind_of_call_can_fail(server, name):
    env = {FAIL: f"{name}:{EACH[name]}:2"}
    expected = dict.fromkeys(EACH, 0)
    expected[name] = 2
    (found,) = server.run(faults.each_call, 1, env=env)
    assert found == expected


def test_a_fault_inside_a_group_is_the_group_s(server):
    env = {FAIL: "AllReduce:2:3"}
    assert server.run(faults.failing_group, 2, env=env) == [(3, 3, True)] * 2


def test_an_asynchronous_fault_shows_later(server):
    env = {FAIL: "AllReduce:2:6:async@1"}
    waited, failed = server.run(faults.asynchronous, 2, env=env)
    assert failed == ((True, REMOTE_ERROR), REMOTE_ERROR)
    assert waited[0] == INTERNAL_ERROR


def test_a_hang_ends_with_an_abort(server):
    env = {"NCCL_EMULATOR_HANG": "AllReduce:2@1", "NCCL_EMULATOR_DEADLOCK_S": "0.1"}
    outcomes = server.outcomes(faults.hanging, 2, env=env)
    for outcome in outcomes:
        assert outcome.error is None
        code, _, seconds = outcome.value
        # Who gives up last may first see that the other one has left.
        assert code in (INTERNAL_ERROR, REMOTE_ERROR)
        assert seconds > 0.5
    assert "deadlock" not in "".join(outcome.stderr for outcome in outcomes)


@pytest.mark.parametrize(("setting", "slow"), [("150000", [0, 1]), ("150000@1", [1])])
def test_calls_can_be_slow(server, setting, slow):
    found = server.run(faults.slow_calls, 2, env={"NCCL_EMULATOR_DELAY_US": setting})
    for rank, (two_calls_s, aborted_s) in enumerate(found):
        assert (two_calls_s > 0.29) == (rank in slow), found
        assert aborted_s < 0.14, found


@pytest.mark.parametrize(("setting", "number"), [({}, 22707), ("20705", 20705)])
def test_version(server, setting, number):
    env = {"NCCL_EMULATOR_VERSION": setting} if setting else {}
    assert server.run(faults.version, 1, env=env) == [(number, "host")]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (FAIL, "AllReduce"),
        (FAIL, "AllReduce:1"),
        (FAIL, "AllReduce:0:2"),
        (FAIL, "Allreduce:1:2"),
        (FAIL, "AllReduce:1:2;Send:1:2"),
        (FAIL, "GroupEnd:1:2:async"),
        ("NCCL_EMULATOR_HANG", "Init:1"),
        ("NCCL_EMULATOR_HANG", "AllReduce:1:2"),
        ("NCCL_EMULATOR_DELAY_US", "1ms"),
        ("NCCL_EMULATOR_VERSION", "2.27.5"),
        ("NCCL_EMULATOR_VERSION", "2.27"),
        ("NCCL_EMULATOR_CHUNK_BYTES", "1000"),
    ],
)
def test_an_order_that_cannot_be_read_ends_the_process(server, variable, text):
    program = faults.version if variable.endswith("VERSION") else faults.three_calls
    (outcome,) = server.outcomes(program, 1, env={variable: text})
    assert outcome.exit_code == -6
    assert f"cannot read {variable}={text}" in outcome.stderr


def test_an_unknown_variable_ends_the_process(server):
    env = {"NCCL_EMULATOR_FAILS": "AllReduce:1:2"}
    (outcome,) = server.outcomes(faults.three_calls, 1, env=env)
    assert outcome.exit_code == -6
    assert "there is no variable NCCL_EMULATOR_FAILS" in outcome.stderr


def test_log(server, tmp_path):
    env = {"NCCL_EMULATOR_LOG": str(tmp_path / "calls")}
    server.run(faults.logged, 2, env=env)
    logs = [path.read_text().splitlines() for path in tmp_path.glob("calls.*")]
    assert len(logs) == 2
    logs.sort(key=lambda lines: "rank=1" in lines[-1])
    name = re.search(r"comm=(\S+)", logs[0][0])[1]
    for rank, lines in enumerate(logs):
        who = f"comm={name} rank={rank} size=2"
        part = f"comm={name}.0.0 rank={1 - rank} size=2"
        expected = [
            f"op=Init {who} group=0",
            f"op=Split color=0 key={-rank} {who} seq=0 group=0",
            f"op=AllReduce count=6 type=float32 redop=max root=- peer=- {who} "
            "stream=0xabc seq=1 inplace=0 group=0",
            f"op=AllReduce count=6 type=float32 redop=sum root=- peer=- {who} "
            "stream=0x0 seq=2 inplace=1 group=0",
            f"op=Broadcast count=6 type=float32 redop=- root=1 peer=- {part} "
            "stream=0x0 seq=0 inplace=1 group=0",
            f"op=ReduceScatter count=3 type=float32 redop=avg root=- peer=- {who} "
            "stream=0x0 seq=3 inplace=1 group=0",
            f"op=AllGather count=3 type=float32 redop=- root=- peer=- {who} "
            "stream=0x0 seq=4 inplace=1 group=0",
            f"op=Send count=6 type=float32 redop=- root=- peer={1 - rank} {who} "
            "stream=0x0 seq=0 inplace=0 group=1",
            f"op=Recv count=6 type=float32 redop=- root=- peer={1 - rank} {who} "
            "stream=0x0 seq=0 inplace=0 group=1",
        ]
        if rank == 0:
            expected.insert(0, f"op=GetUniqueId comm={name}")
        assert lines == expected


def test_faults_are_in_the_log(server, tmp_path):
    env = {
        "NCCL_EMULATOR_LOG": str(tmp_path / "calls"),
        FAIL: "AllReduce:2:2,AllReduce:3:6:async",
    }
    assert server.run(faults.three_calls, 1, env=env) == [[0, 2, 0]]
    (path,) = tmp_path.iterdir()
    found = [line for line in path.read_text().splitlines() if "fault=" in line]
    assert [re.sub("comm=[^ ]+ ", "", line) for line in found] == [
        "op=AllReduce rank=0 size=1 fault=error code=2",
        "op=AllReduce rank=0 size=1 fault=async code=6",
    ]
