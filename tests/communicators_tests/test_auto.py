"""The communicator that measures the others."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from communicators_tests.conftest import TOPOLOGIES
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from communicators import Topology, create_communicator
from communicators.candidate import Candidate
from communicators.devices.host import nccl_takes_host_memory
from communicators.tuning import (
    ChoiceCache,
    first_candidates,
    refinements,
)

pytestmark = pytest.mark.skipif(
    nccl_takes_host_memory(), reason="NumPy arrays travel by NCCL here"
)
parallel = pytest.mark.parallel([2, 3, 4])
SEVERAL = {2: ["2x1"], 3: ["3x1", "2+1"], 4: ["2x2", "3+1", "a,b,a,b"]}
N_ELEMS = 100_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache file of the job's own; on rank 0, where it is used."""
    path = tmp_path / "auto.json"
    monkeypatch.setenv("CHAINERMN_NG_AUTO_CACHE", str(path))
    return path


def averages(comm, n_elems: int = N_ELEMS) -> bool:
    """Average three arrays; tell whether the results are right."""
    shapes = [(n_elems,), (3, 4), ()]
    arrays = [np.full(shape, comm.rank + 1, "f4") for shape in shapes]
    comm.allreduce_arrays(arrays)
    return all((a == (comm.size + 1) / 2).all() for a in arrays)


def log_of(caplog) -> str:
    """Return what has been logged since the last call."""
    text = caplog.text
    caplog.clear()
    return text


@parallel
def test_all_ranks_take_the_same_and_the_next_run_begins_with_it(cache, caplog):
    caplog.set_level(logging.INFO, "chainermn_ng")
    for topology in SEVERAL[MPI.COMM_WORLD.size]:
        cache.unlink(missing_ok=True)
        log_of(caplog)
        for run in range(2):
            with create_communicator("auto", topology=topology) as comm:
                ok = averages(comm)
                assert_all_ranks(comm, ok, f"{topology}: a mean is wrong")
                chosen = comm.allgather_obj([str(c) for c in comm.choices.values()])
                same = len(chosen[0]) == 1 and all(c == chosen[0] for c in chosen)
                text = log_of(caplog)
                if comm.rank == 0:
                    known = json.loads(cache.read_text())
                    same = same and len(known) == 1
                    (value,) = known.values()
                    same = same and str(Candidate.from_json(value)) == chosen[0][0]
                    said = "as measured before" if run else "measured: "
                    same = same and said in text and chosen[0][0] in text
                    if not run:
                        # The table names all that fit, each with its time.
                        names = map(str, first_candidates(comm.topology))
                        same = same and all(name in text for name in names)
                        same = same and text.count("measured: ") == 1
                else:
                    same = same and not text
                assert_all_ranks(comm, same, f"{topology}, run {run}: {chosen} {text}")


@parallel
def test_small_loads_follow_the_topology(cache):
    for topology in TOPOLOGIES[MPI.COMM_WORLD.size]:
        with create_communicator("auto", topology=topology) as comm:
            ok = averages(comm, 1000) and not comm.choices and not cache.exists()
            assert_all_ranks(comm, ok, f"{topology}: {comm.choices}")


@parallel
def test_each_size_is_measured_by_itself_and_what_lost_is_given_back(cache):
    size = MPI.COMM_WORLD.size
    with create_communicator("auto", topology=f"{size}x1") as comm:
        before = len(comm.sent_bytes)
        ok = averages(comm, 100_000) and averages(comm, 400_000)
        ok = ok and len(comm.choices) == 2
        held = {id(comm._inner_of[choice]) for choice in comm.choices.values()}
        ok = ok and len(comm._held) <= len(held) + 1
        sent = dict(comm.sent_bytes)
        ok = ok and averages(comm, 400_000) and len(comm.choices) == 2
        more = sum(comm.sent_bytes.values()) - sum(sent.values())
        # One reduction, no further measurement.
        ok = ok and 0 < more < 4 * 400_100 * 2 and before <= len(sent)
        assert_all_ranks(comm, ok, f"{comm.choices} {more}")


@parallel
def test_on_one_host_without_each_others_memory_there_is_a_choice(cache, monkeypatch):
    monkeypatch.setenv("CHAINERMN_NG_CROSS_MEMORY", "0")
    with create_communicator("auto") as comm:
        assert_all_ranks(comm, averages(comm) and len(comm.choices) == 1)
    monkeypatch.setenv("CHAINERMN_NG_CROSS_MEMORY", "1")
    with create_communicator("auto") as comm:
        assert_all_ranks(comm, averages(comm) and not comm.choices)


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"KEY": 3}',
        '{"KEY": {"name": "gone", "options": {}}}',
        '{"KEY": {"name": "dummy", "options": {}}}',
        '{"KEY": {"name": "flat", "options": {"allreduce_grad_dtype": "float16"}}}',
        None,
    ],
)
def test_a_useless_cache_file_costs_a_measurement(cache, caplog, content):
    caplog.set_level(logging.INFO, "chainermn_ng")
    with create_communicator("auto", topology="2x1") as comm:
        averages(comm)
        if comm.rank == 0:
            (key,) = json.loads(cache.read_text())
            if content is None:
                cache.unlink()
                cache.mkdir()
            else:
                cache.write_text(content.replace("KEY", key.replace('"', '\\"')))
    log_of(caplog)
    with create_communicator("auto", topology="2x1") as comm:
        ok = averages(comm) and len(comm.choices) == 1
        text = log_of(caplog)
        if comm.rank == 0:
            ok = ok and "measured: " in text
            warns = content not in ("[]",)
            ok = ok and ("WARNING" in text) == warns
            ok = ok and [p.name for p in cache.parent.iterdir()] == [cache.name]
        assert_all_ranks(comm, ok, text)


@pytest.mark.parallel([2])
def test_a_choice_of_ones_own_buckets_stays(cache):
    options = {"topology": "2x1", "bucket_bytes": 50_000}
    with create_communicator("auto", **options) as comm:
        ok = averages(comm)
        (choice,) = comm.choices.values()
        ok = ok and "bucket_bytes" not in dict(choice.options)
        assert_all_ranks(comm, ok, str(choice))


def test_candidates_fit_the_topology():
    def names(text: str, size: int) -> list[str]:
        return list(map(str, first_candidates(Topology.parse(text, size))))

    assert names("1x4", 4) == ["flat", "multi_ring"]
    assert names("4x1", 4) == ["multi_ring", "flat", "multi_ring(dims=(4,))"]
    assert names("3+1", 4) == ["hierarchical", "flat"]
    assert names("4x2", 8) == [
        "multi_ring",
        "flat",
        "hierarchical",
        "multi_ring(dims=(2, 4))",
    ]


def test_refinements_change_one_thing_at_a_time():
    best = Candidate.of("multi_ring", dims=(2, 4))
    found = refinements(best, 100_000_000, 4 * 2**20)
    assert [set(dict(c.options)) - {"dims"} for c in found] == [
        {"bucket_bytes"},
        {"bucket_bytes"},
        {"bucket_bytes"},
        {"n_chunks"},
        {"n_chunks"},
    ]
    assert refinements(Candidate("flat"), 1_000_000, 2**20) == []
    # Buckets that hold all the arrays cannot get any larger.
    sizes = [dict(c.options) for c in refinements(Candidate("flat"), 2**21, 2**22)]
    assert sizes == [{"bucket_bytes": 2**19}, {"bucket_bytes": 2**20}]


def test_the_cache_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINERMN_NG_AUTO_CACHE", str(tmp_path / "deep" / "auto.json"))
    cache = ChoiceCache()
    for i in range(205):
        cache.put(str(i), Candidate.of("flat", bucket_bytes=i))
    assert cache.get("4") is None
    assert cache.get("204") == Candidate.of("flat", bucket_bytes=204)
    monkeypatch.setenv("CHAINERMN_NG_AUTO_CACHE", "0")
    assert ChoiceCache().get("204") is None
    ChoiceCache().put("1", Candidate("flat"))
    assert len(list((tmp_path / "deep").iterdir())) == 1
