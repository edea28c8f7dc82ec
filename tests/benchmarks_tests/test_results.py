"""From repetitions to ratios, and from results to the table."""

from __future__ import annotations

import pytest

from benchmarks.contest import best_of
from benchmarks.gradient_shapes import nbytes_of, shapes_of
from benchmarks.links import link_seconds, rate_in
from benchmarks.programs.contenders import parse_options
from benchmarks.report import BEGIN, END, markdown, put_between_markers
from benchmarks.results import (
    Row,
    Table,
    compare,
    duration,
    fastest,
    quartiles,
    slowest,
    spread_of_ratios,
)


def row(**more: object) -> Row:
    return Row("key", "what", "peers", 0.5, **more)


def test_a_repetition_counts_as_on_its_slowest_rank():
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == [3.0, 5.0, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 2.0], [1.0]])


def test_quartiles_are_of_the_values_themselves():
    assert quartiles([4.0]) == (4.0, 4.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 4.0)


def test_fastest_goes_by_medians():
    seconds = {"lucky": [0.1, 9.0, 9.0], "steady": [2.0, 2.0, 2.0]}
    assert fastest(seconds, seconds) == "steady"


def test_the_best_of_ours_is_compared_with_the_best_peer():
    seconds = {
        "ours:slow": [9.0, 9.0, 9.0],
        "ours:fast": [1.0, 2.0, 3.0],
        "peer:slow": [8.0, 8.0, 8.0],
        "peer:fast": [4.0, 4.0, 5.0],
    }
    filled = row()
    compare(filled, seconds, ["ours:slow", "ours:fast"], ["peer:slow", "peer:fast"])
    assert filled.ratio == 0.5
    assert filled.spread == (0.375, 0.55)
    assert filled.is_met
    assert filled.ours == "fast 2.00 s"
    assert filled.peers == ["peer:slow 8.00 s", "peer:fast 4.00 s"]
    assert filled.notes == ["of our own also measured: slow 9.00 s"]
    assert filled.seconds == seconds


def test_the_best_two_stay_and_the_default():
    seconds = {"ours:auto": [4.0], "ours:b": [1.0], "ours:c": [3.0], "ours:d": [2.0]}
    assert best_of(seconds) == ["ours:b", "ours:d", "ours:auto"]
    seconds["ours:auto"] = [0.5]
    assert best_of(seconds) == ["ours:auto", "ours:b"]
    del seconds["ours:auto"]
    assert best_of(seconds) == ["ours:b", "ours:d"]


def test_ratios_are_within_rounds():
    assert spread_of_ratios([1.0, 4.0], [2.0, 8.0]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("ratio", "is_met"), [(None, None), (0.5, True), (0.501, False)]
)
def test_goals_are_upper_bounds(ratio, is_met):
    assert row(ratio=ratio).is_met is is_met


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.345, "12.3 s"),
        (1.0, "1.00 s"),
        (0.9996, "1.00 s"),
        (0.9994, "999 ms"),
        (1234.5, "1234 s"),
        (0.2, "200 ms"),
        (0.00123456, "1.23 ms"),
        (0.00012, "120 us"),
        (0.0, "0 us"),
    ],
)
def test_durations_have_a_fitting_unit(seconds, text):
    assert duration(seconds) == text


def test_the_link_carries_what_an_all_reduce_has_to_send():
    # Two hosts: each sends all bytes once; four: one and a half times.
    assert link_seconds(2, 100_000_000, 1e8) == pytest.approx(1.0)
    assert link_seconds(4, 100_000_000, 1e8) == pytest.approx(1.5)
    report = {"end": {"sum_received": {"bits_per_second": 8e8}}}
    assert rate_in(report) == 1e8


def test_sets_of_gradients_have_their_sizes():
    assert nbytes_of("resnet50") == 4 * 25_557_032
    assert len(shapes_of("resnet50")) == 161
    assert nbytes_of("16MiB") == 16 << 20
    assert nbytes_of("64KiB") == 64 << 10
    assert len(shapes_of("64KiB")) == 20


def test_options_of_communicators_are_literals_or_texts():
    assert parse_options("") == {}
    assert parse_options("bucket_bytes=1024,topology=2x2,timeout_s=None") == {
        "bucket_bytes": 1024,
        "topology": "2x2",
        "timeout_s": None,
    }
    with pytest.raises(ValueError, match="OPTION=VALUE"):
        parse_options("bucket_bytes")


def test_the_table_has_ratios_verdicts_and_reasons():
    text = markdown(
        {"date": "today", "Python": "3"},
        [
            row(ratio=0.4, spread=(0.3, 0.45), ours="flat 1 s", peers=["2.5 s"]),
            row(ratio=0.6, notes=["a note"]),
            row(skipped="no | root"),
            row(skipped="line\nafter line", failed=True),
        ],
        [Table("scaling", "Scaling", ["ranks", "call"], [["1", "2 ms"]])],
    )
    lines = text.splitlines()
    assert lines[0] == "date today; Python 3."
    ratio = "**0.40** (0.30 to 0.45)"
    assert f"| `key` what | flat 1 s | peers: 2.5 s | {ratio} | 0.50 | met |" in lines
    assert "| `key` what | - | peers | **0.60** | 0.50 | not met |" in lines
    assert r"| `key` what | - | peers | - | 0.50 | skipped: no \| root |" in lines
    assert "| `key` what | - | peers | - | 0.50 | failed: line after line |" in lines
    assert lines[lines.index("- `key`: a note") - 1] == ""
    assert text.endswith("### Scaling\n\n| ranks | call |\n| --- | --- |\n| 1 | 2 ms |")


def test_figures_replace_those_between_the_markers():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    written = put_between_markers(page, "new")
    assert written == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert put_between_markers(written, "new") == written


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}" * 2])
def test_a_page_without_one_place_for_figures_is_refused(page):
    with pytest.raises(ValueError, match="expected one"):
        put_between_markers(page, "new")
