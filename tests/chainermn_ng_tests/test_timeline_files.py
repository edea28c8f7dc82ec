"""Traces without ranks: events, files, merging, the table of the command line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner
from helpers.traces import faults, load, spans_of
from hypothesis import given
from hypothesis import strategies as st

from chainermn_ng.cli.group import chainermn_ng
from chainermn_ng.timeline.clocks import ClockReading, CommonClock
from chainermn_ng.timeline.events import Step, events_of, rows_of
from chainermn_ng.timeline.summary import summarise
from chainermn_ng.timeline.trace_files import (
    Header,
    Trace,
    TraceError,
    merge_traces,
    read_trace,
    write_trace,
)
from communicators.recording import Span

MS = 1_000_000


def span(name, start_ms, end_ms, lane="main", **details):
    return Span(name, round(start_ms * MS), round(end_ms * MS), lane, details)


def one_step(compute_ms=20):
    """A step of 10 ms data, a pass each way, two buckets, 5 ms update, 3 ms rest."""
    forward, start = compute_ms / 2, 10 + compute_ms
    return [
        span("forward", 10, 10 + forward),
        span("backward", 10 + forward, start),
        span("average", start, start + 12),
        span("agreement", start, start + 1),
        span("pack", start + 1, start + 2, bucket=0),
        span("flight", start + 2, start + 8, "communication", bucket=0, nbytes=8),
        span("pack", start + 2, start + 3, bucket=1),
        span("flight", start + 3, start + 10, "communication", bucket=1, nbytes=8),
        span("unpack", start + 10, start + 11, bucket=0),
        span("update", start + 12, start + 17),
    ]


def trace_of(rank, size=2, run="r", compute_ms=20):
    step = Step(7, 0, round((compute_ms + 30) * MS))
    events = events_of(rank, f"h{rank}", [step], one_step(compute_ms), lambda ns: ns)
    header = Header(run, size, [rank], [7], "flat", f"1x{size}", [f"h{rank}"], [0.0])
    return Trace(header, events)


def run(*arguments):
    return CliRunner().invoke(chainermn_ng, ["timeline", *map(str, arguments)])


# -- events ---------------------------------------------------------------------------


def test_flights_side_by_side_have_rows_of_their_own():
    events = trace_of(0).events
    assert faults(events) == []
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["communication", "communication 2", "main"]
    flights = [e for e in events if e["name"] == "flight"]
    assert len({e["tid"] for e in flights}) == 2
    assert [e["args"]["bucket"] for e in flights] == [0, 1]


times = st.tuples(st.integers(0, 50), st.integers(0, 50))
spans = st.lists(
    st.builds(
        lambda name, ab: Span(name, min(ab), max(ab)), st.sampled_from("abc"), times
    )
)


@given(spans)
def test_rows_hold_every_span_once_and_none_cross(given_spans):
    rows = rows_of(given_spans)
    placed = [id(placed) for row in rows for placed in row]
    assert sorted(placed) == sorted(map(id, given_spans))
    for row in rows:
        for i, a in enumerate(row):
            for b in row[i + 1 :]:
                apart = a.end_ns <= b.start_ns
                inside = b.end_ns <= a.end_ns and a.name != b.name
                assert apart or inside, (a, b)


def test_the_time_between_updates_is_named_by_what_follows():
    by_name = {e["name"]: e for e in trace_of(0).events}
    assert (by_name["data"]["ts"], by_name["data"]["dur"]) == (0.0, 10_000.0)
    assert by_name["after update"]["dur"] == 3_000.0
    step = Step(1, 0, 10 * MS)
    events = events_of(0, "h", [step], [span("average", 4, 6)], lambda ns: ns)
    assert "before update" in {e["name"] for e in events}
    assert "data" not in {e["name"] for e in events}


def test_a_span_belongs_to_the_step_in_which_it_began():
    steps = [Step(3, 0, 10 * MS), Step(4, 10 * MS, 20 * MS), Step(9, 50 * MS, 60 * MS)]
    flights = [
        span("flight", start, start + 5, "communication")
        for start in (-2, 8, 12, 22, 50)
    ]
    events = events_of(0, "h", steps, flights, lambda ns: ns)
    found = [e["args"]["step"] for e in spans_of(events, "flight", 0)]
    assert found == [3, 3, 4, 4, 9]


def test_clocks_that_drift_are_one():
    clock = CommonClock(
        1_000, [ClockReading(5_000, -4_000, 30), ClockReading(7_000, -3_800, 50)]
    )
    assert [clock.of(t) for t in (5_000, 6_000, 7_000)] == [0, 1_100, 2_200]
    assert [clock.of(t) for t in (4_000, 8_000)] == [-1_000, 3_200]
    assert clock.error_ns == 50


# -- the table ------------------------------------------------------------------------


def test_the_summary_adds_up():
    (rank,) = summarise(trace_of(0)).ranks
    expected = {
        "data": 10,
        "forward": 10,
        "backward": 10,
        "average": 12,
        # Of the flights, which overlap, the time in which there is one.
        "agreement": 1,
        "pack": 2,
        "flight": 8,
        "unpack": 1,
        "update": 5,
        "after update": 3,
    }
    assert rank.phases_s == {k: pytest.approx(v / 1e3) for k, v in expected.items()}
    assert rank.step_s == pytest.approx(0.050)
    assert rank.exposed_s == pytest.approx(0.012)
    assert rank.work_s == pytest.approx(0.038)
    assert rank.n_flights == 2


def test_communication_beside_the_backward_pass_is_not_exposed():
    step = Step(1, 0, 30 * MS)
    recorded = [
        span("forward", 0, 5),
        span("backward", 5, 20),
        span("pack", 9, 10, "background"),
        span("flight", 10, 24, "communication"),
        span("update", 25, 30),
    ]
    events = events_of(0, "h", [step], recorded, lambda ns: ns)
    header = Header("r", 1, [0], [1], "flat", "1x1", ["h"], [0.0])
    (rank,) = summarise(Trace(header, events)).ranks
    assert rank.exposed_s == pytest.approx(0.004)


def test_files_of_ranks_become_one_trace_and_a_table(tmp_path):
    files = [tmp_path / f"t{rank}.json.gz" for rank in range(3)]
    for rank, path in enumerate(files):
        write_trace(path, trace_of(rank, 4, compute_ms=40 if rank == 1 else 20))
    out = tmp_path / "all.json"
    result = run(*reversed(files), "-o", out)
    assert result.exit_code == 0, result.output
    content = load(out)
    assert faults(content["traceEvents"]) == []
    assert {e["pid"] for e in content["traceEvents"]} == {0, 1, 2}
    assert "Slowest: rank 1 on h1, with 58.0 ms" in result.output
    assert "Not here: rank 3 of 4" in result.output
    assert "Exposed communication: 12.0 ms of a step of 50.0 ms (24%)" in result.output
    # What was merged can be read like any other.
    again = run(out)
    assert again.exit_code == 0, again.output
    assert "Slowest: rank 1" in again.output


def test_many_ranks_are_shown_by_the_least_and_the_most(tmp_path):
    path = tmp_path / "t.json"
    traces = [trace_of(rank, 9, compute_ms=20 + rank) for rank in range(9)]
    write_trace(path, merge_traces(traces))
    result = run(path)
    lines = [line.split() for line in result.output.splitlines()]
    forward = next(line for line in lines if "forward" in line)
    numbers = [word for word in forward if word[0].isdigit()]
    assert numbers == ["10.0", "12.0", "14.0"]
    assert "Slowest: rank 8" in result.output


# -- files that are wrong -------------------------------------------------------------


def test_a_trace_comes_back_as_it_was(tmp_path):
    for name in ("t.json", "t.json.gz"):
        write_trace(tmp_path / name, trace_of(1))
        assert read_trace(tmp_path / name) == trace_of(1)


def damaged(change):
    """A function that writes a trace of which the JSON has been changed."""

    def write(path):
        write_trace(path, trace_of(0))
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return write


def cut(path):
    write_trace(path.with_suffix(".gz"), trace_of(0))
    data = path.with_suffix(".gz").read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flipped(path):
    write_trace(path.with_suffix(".gz"), trace_of(0))
    data = bytearray(path.with_suffix(".gz").read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def header_of(content):
    return content["otherData"]["chainermn_ng_timeline"]


def first_span(content):
    return next(e for e in content["traceEvents"] if e["ph"] == "X")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: path.write_text(""), "no JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "no JSON"),
        (lambda path: path.write_text("[]"), "not written by extensions.Timeline"),
        (
            lambda path: path.write_text('{"traceEvents": []}'),
            "not written by extensions.Timeline",
        ),
        (cut, "damaged"),
        (flipped, "damaged"),
        (damaged(lambda c: header_of(c).update(version=2)), "version 2 of the file"),
        (damaged(lambda c: header_of(c).pop("hosts")), "damaged"),
        (damaged(lambda c: header_of(c).update(ranks=[5], size=2)), "ranks [5] of 2"),
        (damaged(lambda c: c.update(traceEvents=None)), "its events are no list"),
        (damaged(lambda c: first_span(c).pop("ts")), "damaged: 'ts'"),
        (damaged(lambda c: first_span(c).update(dur="1")), "dur '1' of step 7"),
        (damaged(lambda c: first_span(c).update(pid=3)), "an event of rank 3"),
        (
            damaged(lambda c: first_span(c).update(dur=-1.0)),
            "dur -1.0 of step 7: below",
        ),
        (damaged(lambda c: c.update(traceEvents=[])), "it has no spans"),
        (damaged(lambda c: c["traceEvents"].append(7)), "damaged"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, write, words):
    path = tmp_path / "bad.json"
    write(path)
    result = run(path)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "bad.json: " in result.output
    assert words in result.output


def test_no_file_is_an_error_that_names_it(tmp_path):
    result = run(tmp_path / "none.json")
    assert result.exit_code == 2
    assert "none.json" in result.output


def test_bad_outputs_are_told_before_anything_is_shown(tmp_path):
    path = tmp_path / "t.json"
    write_trace(path, trace_of(0, 1))
    for output, words in (
        (path, "is one of the files to read"),
        (tmp_path / "no" / "t.json", "there is no folder"),
    ):
        result = run(path, "-o", output)
        assert result.exit_code == 2
        assert words in result.output
        assert "phase" not in result.output
    assert read_trace(path) == trace_of(0, 1)
    assert not (tmp_path / "no").exists()


def test_a_rank_that_is_hardly_slower_is_not_waited_for(tmp_path):
    files = [tmp_path / f"t{rank}.json" for rank in range(2)]
    # 38 ms of work, and 38.7.
    for path, rank, compute_ms in zip(files, range(2), (20, 20.7), strict=True):
        write_trace(path, trace_of(rank, compute_ms=compute_ms))
    output = run(*files, "-o", tmp_path / "all.json").output
    assert "No rank is slower than the others: each has about 38.0 ms" in output
    assert "wait for it" not in output


def test_files_that_do_not_belong_together_are_refused():
    with pytest.raises(TraceError, match="rank 0 is in two of the files"):
        merge_traces([trace_of(0), trace_of(0)])
    with pytest.raises(TraceError, match="of different recordings"):
        merge_traces([trace_of(0), trace_of(1, run="other")])


def test_a_file_is_whole_or_not_there(tmp_path):
    whole = trace_of(0)
    path = tmp_path / "t.json"
    write_trace(path, whole)
    wrong = dataclasses.replace(whole, events=[{"no": object()}])
    with pytest.raises(TypeError):
        write_trace(path, wrong)
    assert read_trace(path) == whole
    assert list(tmp_path.iterdir()) == [path]
