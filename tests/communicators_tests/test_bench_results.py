"""The arithmetic of a bench's rows, their file, and the line that they recommend."""

import dataclasses
import json
import math

import pytest

from communicators.bench_results import (
    BUS_FACTORS,
    Results,
    Row,
    best_row,
    fast_mpi_loads,
    nearly_best,
    read_results,
    script_line,
    write_results,
)

MACHINE = {"ranks": 4, "topology": "2x2", "hosts": [], "device": "cpu"}


def row(communicator="flat", times_s=(0.5,), **values):
    values = {"nbytes": 1_000_000_000, **values}
    return Row(
        communicator, "allreduce_arrays", "float32", times_s=tuple(times_s), **values
    )


def results(*rows):
    return Results("2026-11-30T12:00:00+00:00", MACHINE, {"warm_up": 3}, list(rows))


def test_bandwidths_are_those_computed_by_hand():
    one = row(times_s=(9.0, 0.5, 0.25))
    assert one.time_s == 0.5
    assert one.algbw_gb_s == 2.0
    # 2 (n-1)/n: on 4 ranks 1.5, on 2 ranks 1, on one rank nothing travels.
    assert [one.busbw_gb_s(n) for n in (4, 2, 1)] == [3.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("allreduce_arrays", 1.5),
        ("allreduce", 1.5),
        ("bcast", 1.0),
        ("allgather", 0.75),
        ("reduce_scatter", 0.75),
        ("alltoall", 0.75),
    ],
)
def test_each_operation_has_its_factor(operation, factor):
    one = dataclasses.replace(row(), operation=operation)
    assert one.busbw_gb_s(4) == 2.0 * factor
    assert operation in BUS_FACTORS


def test_the_file_gives_back_what_was_written(tmp_path):
    before = results(
        row("mpi", (0.25, 0.5)),
        row(
            "multi_ring",
            (0.125,),
            options={"dims": (2, 2), "n_chunks": 8, "topology": "2x2"},
            wire_dtype="float16",
            load="resnet50",
            n_arrays=161,
        ),
        row("pure_nccl", (), skipped="no NCCL"),
    )
    write_results(tmp_path / "b.json", before)
    assert read_results(tmp_path / "b.json") == before
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["schema"] == "chainermn-ng bench"
    assert content["version"] == 1
    assert content["rows"][0]["times_s"] == [0.25, 0.5]
    assert content["recommended"] == before.recommended
    # A later version of ours may say more of a row.
    content["rows"][0]["new"] = 1
    (tmp_path / "b.json").write_text(json.dumps(content))
    assert read_results(tmp_path / "b.json") == before


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("no json", "no JSON"),
        ("[]", "not written by"),
        ('{"schema": "other"}', "not written by"),
        (
            '{"schema": "chainermn-ng bench", "version": 2}',
            "version 2 .* reads version 1",
        ),
        ('{"schema": "chainermn-ng bench", "version": 1}', "incomplete"),
    ],
)
def test_other_files_are_refused(text, what, tmp_path):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"b.json: {what}"):
        read_results(path)


def test_the_best_is_the_fastest_of_one_load_but_never_the_bare_library():
    rows = [row("mpi", (0.1,)), row("flat", (0.3,)), row("naive", (0.2, 9.0, 0.1))]
    assert best_row(rows).communicator == "naive"
    assert best_row(rows[:1]) is None
    assert results(*rows[:1]).recommended is None


def test_those_that_are_nearly_as_fast_are_told():
    times = {"mpi": 1.0, "flat": 1.06, "naive": 1.04, "auto": 1.0, "multi_ring": 1.02}
    rows = [row(name, (time_s,)) for name, time_s in times.items()]
    assert best_row(rows).communicator == "auto"
    assert nearly_best(rows) == ["multi_ring", "naive"]
    assert nearly_best(rows[:1]) == []


@pytest.mark.parametrize(
    ("auto", "is_auto"), [((1.1, 1.0, 1.2), True), ((1.1, 1.01), False), ((), False)]
)
def test_auto_is_recommended_where_it_is_not_told_from_the_fastest(auto, is_auto):
    rows = [
        row("flat", (0.9, 1.0, 1.4)),
        row("auto", auto, skipped=None if auto else ""),
    ]
    chosen = results(*rows).recommended_row
    assert best_row(rows).communicator == "flat"
    assert chosen.communicator == ("auto" if is_auto else "flat")
    # It has to be so at all loads.
    rows += [row("flat", (1.0,), nbytes=8), row("auto", (1.5,), nbytes=8)]
    assert results(*rows).recommended_row.communicator == "flat"


def test_where_all_names_do_the_same_auto_is_recommended():
    rows = [row("mpi", (0.1,)), row("flat", (1.0,)), row("naive", (2.0,))]
    same = dataclasses.replace(results(*rows), same_way=True)
    line = "comm = chainermn_ng.create_communicator({})"
    assert same.recommended == line.format('"auto"')
    slow = row("auto", (3.0,), options={"bucket_bytes": 64}, wire_dtype="float16")
    same = dataclasses.replace(same, rows=[*rows, slow])
    assert same.recommended == line.format(
        '"auto", bucket_bytes=64, allreduce_grad_dtype="float16"'
    )


def test_the_bare_library_is_named_where_it_beats_all_of_ours_at_small_loads():
    rows = [
        *(row("mpi", (1.0,), nbytes=n) for n in (8, 64, 2**20)),
        row("flat", (1.1,), nbytes=8),
        row("naive", (1.2,), nbytes=8),
        row("flat", (1.1,), nbytes=64),
        row("naive", (0.9,), nbytes=64),
        row("flat", (1.1,), nbytes=2**20),
    ]
    assert [one.nbytes for one in fast_mpi_loads(rows)] == [8]


def test_the_best_of_several_loads_has_the_least_ratios():
    small, large = {"nbytes": 1024}, {"nbytes": 2**30}
    rows = [
        # 3 times the best, and the best: worse than 1.5 times and 1.5 times.
        row("flat", (3.0,), **small),
        row("flat", (10.0,), **large),
        row("naive", (1.5,), **small),
        row("naive", (15.0,), **large),
        # The fastest, but not there for all loads.
        row("multi_ring", (1.0,), **small),
        row("multi_ring", (), **large, skipped="a reason"),
    ]
    assert best_row(rows).communicator == "naive"
    assert best_row([*rows, row("naive", (math.inf,), nbytes=7)]).communicator == (
        "naive"
    )


@pytest.mark.parametrize(
    ("one", "arguments"),
    [
        (row("flat"), '"flat"'),
        (
            row("multi_ring", options={"dims": (2, 2), "n_chunks": 8}),
            '"multi_ring", dims=(2, 2), n_chunks=8',
        ),
        (row("multi_ring", options={"dims": [4]}), '"multi_ring", dims=(4,)'),
        (
            row("flat", options={"topology": "a,b"}, wire_dtype="float16"),
            '"flat", topology="a,b", allreduce_grad_dtype="float16"',
        ),
    ],
)
def test_the_line_is_python(one, arguments):
    assert script_line(one) == f"comm = chainermn_ng.create_communicator({arguments})"
