"""The command line: its commands, their output, and bad input on one rank or all."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import re

import numpy as np
import pytest
from helpers.jobs import run_job
from helpers.ranks import assert_all_ranks
from rich.console import Console

import chainermn_ng
from chainermn_ng.cli import bench_progress, group
from chainermn_ng.cli import main as entry
from chainermn_ng.cli.bench import measure
from chainermn_ng.cli.bench_plot import write_plot
from chainermn_ng.cli.bench_table import format_time, plain_table, print_results
from communicators import __version__
from communicators.bench import Load, Settings
from communicators.bench_candidates import choose_candidates
from communicators.bench_results import Results, Row, read_results, write_results
from communicators.measuring import Timing

QUICK = ["--budget-s", "0.05", "--repetitions", "2", "--warm-up", "1"]


def run(*args):
    """Run the command line in this process; return its exit status."""
    with pytest.raises(SystemExit) as caught:
        entry.main(args)
    return caught.value.code


# -- the group ---


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"chainermn-ng {__version__}\n"


def test_help_names_all_commands(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name, summary in group.SUMMARIES.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)
    assert set(group.SUMMARIES) == set(group.COMMANDS)


def test_an_unknown_command_is_an_error(capsys):
    assert run("bensh") == 2
    assert "No such command 'bensh'" in capsys.readouterr().err


def test_help_of_a_command(capsys):
    assert run("bench", "--help") == 0
    text = capsys.readouterr().out
    assert "mpiexec -n 4 chainermn-ng bench --model resnet50\n" in text
    assert "resnet50|transformer-base|vgg16" in text


def test_without_its_packages_it_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setattr(entry, "PACKAGES", ("rich", "click_that_nobody_has"))
    assert run("bench") == 1
    assert capsys.readouterr().err == (
        "chainermn-ng: the command line needs click_that_nobody_has; "
        "the extra 'cli' brings it: pip install '.[cli]' in a checkout of "
        "chainermn_ng\n"
    )


# -- what is printed ---

SKIPPED = Row("pure_nccl", "allreduce_arrays", "float32", 2**20, skipped="no NCCL")


def results(*rows, ranks=4):
    machine = {
        "mpi": "MPICH Version:      5.0.2",
        "python": "3.13.1",
        "packages": {"numpy": "2.4.6"},
        "ranks": ranks,
        "topology": f"1x{ranks}",
        "hosts": [{"name": "a", "cores": 2, "ranks": ranks}],
        "device": "cpu",
    }
    return Results("2026-11-30T12:00:00+00:00", machine, {}, list(rows))


def row(name, times_s, **values):
    values = {"nbytes": 2**20, **values}
    return Row(name, "allreduce_arrays", "float32", times_s=times_s, **values)


def test_the_table_has_these_columns():
    ring = row("multi_ring", (0.001, 0.002, 0.004), options={"dims": (2, 2)})
    half = row(
        "flat", (0.5e-6, 2.0), wire_dtype="float16", load="resnet50", nbytes=10**8
    )
    # 2**20 / 0.002 s = 0.524 GB/s, and 3/2 of that on 4 ranks.
    assert plain_table(results(ring, half, SKIPPED)).splitlines() == [
        "load          bytes  dtype               communicator            "
        "time      min      max  algbw  busbw",
        "--------  ---------  ------------------  -------------------  "
        "-------  -------  -------  -----  -----",
        "1 MiB       1048576  float32             multi_ring dims=2x2  "
        "2.00 ms  1.00 ms  4.00 ms  0.524  0.786",
        "resnet50  100000000  float32 as float16  flat                  "
        "1.00 s  0.50 us   2.00 s  0.100  0.150",
        "1 MiB       1048576  float32             pure_nccl            "
        "skipped: no NCCL",
    ]


def test_times_have_three_digits():
    seconds = [1.234e-6, 12.34e-6, 0.0001234, 0.01234, 12.34]
    texts = ["1.23 us", "12.3 us", "123 us", "12.3 ms", "12.3 s"]
    assert [format_time(s) for s in seconds] == texts


@pytest.mark.parametrize(
    ("is_terminal", "width", "is_drawn"),
    [(False, 130, False), (True, 130, True), (True, 80, False)],
)
def test_machine_table_and_line_are_printed(is_terminal, width, is_drawn):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width)
    found = results(row("flat", (0.002,)), row("naive", (0.004,)), SKIPPED)
    print_results(found, console)
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    for part in (
        "4 ranks, topology 1x4, hosts: 1 x 4 ranks on 2 cores, arrays: cpu",
        "MPICH Version: 5.0.2, Python 3.13.1, numpy 2.4.6",
        "2.00 ms",
        "skipped: no NCCL",
        "the fastest here:",
        '    comm = chainermn_ng.create_communicator("flat")',
    ):
        assert part in text
    assert is_drawn == ("┃" in text)


def printed(found):
    console = Console(file=io.StringIO())
    print_results(found, console)
    return console.file.getvalue()


def test_the_line_comes_after_its_reason():
    flat, auto = row("flat", (0.002,)), row("auto", (0.0019, 0.0021, 0.0022))
    close = row("naive", (0.00205,))
    assert printed(results(flat, auto, close)).endswith(
        "the fastest here is flat, which auto is not told from:\n\n"
        '    comm = chainermn_ng.create_communicator("auto")\n\n'
        "(not more than 5 % slower: flat, naive)\n"
    )
    same = dataclasses.replace(results(flat, close), same_way=True)
    assert printed(same).endswith(
        "on this host all names reduce gradients in the same way, what is between them "
        'is chance:\n\n    comm = chainermn_ng.create_communicator("auto")\n\n'
    )


def test_a_faster_bare_library_is_told_with_the_reason():
    rows = [row(name, (t,), nbytes=1024) for name, t in (("mpi", 1.0), ("flat", 2.0))]
    assert "mpi is faster at 1 KiB: each call of ours first" in printed(results(*rows))
    assert "mpi is faster" not in printed(results(*rows[1:]))


def test_the_heading_counts_and_says_what_is_pretended():
    found = results(row("flat", (0.002,)), ranks=1)
    assert printed(found).startswith("1 rank, topology 1x1, hosts: 1 x 1 rank on 2 co")
    machine = {**found.machine, "is_pretended": True}
    found = dataclasses.replace(found, machine=machine)
    assert printed(found).startswith("1 rank, topology 1x1 (pretended), hosts:")


def test_where_nothing_was_measured_nothing_is_recommended():
    console = Console(file=io.StringIO())
    print_results(results(SKIPPED), console)
    assert "no communicator was measured" in console.file.getvalue()


@pytest.mark.parametrize(("n_loads", "ranks"), [(0, 4), (1, 4), (3, 1)])
def test_pictures_are_made(n_loads, ranks, tmp_path):
    rows = [
        row(name, (0.001 * factor,), nbytes=4**i)
        for i in range(n_loads)
        for name, factor in (("flat", 1.0), ("naive", 2.0 + i))
    ]
    write_plot(tmp_path / "b.png", results(*rows, SKIPPED, ranks=ranks))
    from matplotlib.image import imread

    pixels = imread(tmp_path / "b.png")
    assert pixels.shape[:2] == (500, 800)
    colours = np.unique(pixels[..., :3].reshape(-1, 3), axis=0)
    is_colour = np.ptp(colours, axis=1) > 0.2
    assert is_colour.any() == (n_loads > 0)


def test_progress_is_a_bar_or_lines_or_nothing(monkeypatch, capsys):
    def report(mode):
        with bench_progress.progress_of(mode) as tell:
            if tell is not None:
                tell(0.25, "resnet50")
        return capsys.readouterr().err

    monkeypatch.setattr(bench_progress, "_LINE_EVERY_S", 0.0)
    line = r"bench: 25 % done after 0 s, at resnet50\n"
    assert report("off") == ""
    assert re.fullmatch(line, report("lines"))
    assert re.fullmatch(line, report("auto"))
    assert "25%" in report("bar")
    monkeypatch.setattr(bench_progress, "_LINE_EVERY_S", 60.0)
    assert report("lines") == ""


# -- bench on ranks ---


@pytest.mark.parallel([1, 2, 3])
def test_bench_measures_writes_and_recommends(comm, tmp_path, capsys):
    dims = f"multi_ring:dims={comm.size},n_chunks=8"
    status = run(
        *("bench", "-c", dims, "--sizes", "1KiB:4KiB", *QUICK),
        *("--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")),
    )
    out = capsys.readouterr().out
    assert_all_ranks(comm, status == 0, out)
    assert_all_ranks(comm, bool(out) == (comm.rank == 0), out)
    there = sorted(path.name for path in tmp_path.iterdir())
    wanted = ["b.json", "b.png"] if comm.rank == 0 else []
    assert_all_ranks(comm, there == wanted, f"{there}")
    line = None
    if comm.rank == 0:
        found = read_results(tmp_path / "b.json")
        assert [one.communicator for one in found.rows] == ["mpi", "multi_ring"] * 2
        assert [one.nbytes for one in found.rows] == [1024] * 2 + [4096] * 2
        line = found.recommended
        assert out.endswith(f"\n    {line}\n\n")
    # The line makes the communicator that was measured.
    name, equals, call = comm.bcast_obj(line).partition(" = ")
    assert (name, equals) == ("comm", " = ")
    made = eval(call, {"chainermn_ng": chainermn_ng})
    engine = made.engine
    assert (engine.name, engine.dims, engine.n_chunks) == (
        "multi_ring",
        (comm.size,),
        8,
    )
    made.finalize()


@pytest.mark.parallel([2, 3])
def test_figures_are_those_of_the_slowest_rank(comm):
    # On rank r each call takes r+1 ms, by a clock that only goes on when it is read.
    readings = itertools.count()
    clock = lambda: 0.001 * (comm.rank + 1) * next(readings)  # noqa: E731
    wanted = Settings(
        choose_candidates(["flat"]), [Load(2**20)], timing=Timing(0, 3, 1.0, clock)
    )
    found = measure(comm.engine, wanted)
    *_, flat = plain_table(found).splitlines()
    # 2 ranks: 2**20 bytes in 2 ms, factor 1; 3 ranks: in 3 ms, factor 4/3.
    time, rates = {2: ("2.00 ms", "0.524  0.524"), 3: ("3.00 ms", "0.350  0.466")}[
        comm.size
    ]
    expected = f"1 MiB  1048576  float32  flat          {time}  {time}  {time}  {rates}"
    assert_all_ranks(comm, flat == expected, flat)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("is_everywhere", [False, True])
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (["--nope"], "No such option"),
        (["--dtype", "int8"], "Invalid value for '--dtype': 'int8' is not one of"),
        (["-c", "flatt"], "unknown communicator 'flatt'"),
        (["--sizes", "12parsecs"], "'12parsecs' is no number of bytes"),
        (["--operation", "bcast", "--model", "vgg16"], "not for bcast"),
    ],
)
def test_bad_input_ends_all_ranks_and_is_told_once(
    comm, capsys, bad, what, is_everywhere
):
    is_bad = is_everywhere or comm.rank == 1
    status = run("bench", "--sizes", "1KiB", *QUICK, *(bad if is_bad else []))
    told = comm.allgather_obj((status, capsys.readouterr().err))
    assert [status for status, _ in told] == [2, 2]
    ranks = "ranks 0, 1" if is_everywhere else "rank 1"
    (text,) = [text for _, text in told if text]
    assert text.startswith(f"Error: the command line failed on {ranks}: ValueError: ")
    assert what in text


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (["--plot", "/nowhere/b.png"], "--plot /nowhere/b.png: there is no folder"),
        (["--json", "/nowhere/b.json"], "--json /nowhere/b.json: there is no folder"),
        (["--plot", "b.txt"], "expected a name that ends in .png, .pdf, .svg"),
        (["-c", "multi_ring:n_chunks=0"], "n_chunks 0: expected 1 to 64"),
    ],
)
def test_what_shows_later_ends_all_ranks_too(comm, capsys, bad, what):
    status = run("bench", "--sizes", "1KiB", *QUICK, *bad)
    told = comm.allgather_obj((status, capsys.readouterr().err))
    assert [status for status, _ in told] == [2, 2]
    (text,) = [text for _, text in told if text]
    assert what in text


@pytest.mark.parallel([2])
def test_ranks_with_other_settings_end_together(comm, capsys):
    status = run("bench", "--sizes", f"{comm.rank + 1}KiB", *QUICK)
    told = comm.allgather_obj((status, capsys.readouterr().err))
    assert [status for status, _ in told] == [2, 2]
    (text,) = [text for _, text in told if text]
    assert "1024 bytes" in text
    assert "2048 bytes" in text


@pytest.mark.parallel([2])
@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="there may be a GPU"
)
def test_without_gpus_the_reason_is_told(comm, capsys):
    status = run("bench", "--device", "gpu", *QUICK)
    told = comm.allgather_obj((status, capsys.readouterr().err))
    assert [status for status, _ in told] == [2, 2]
    (text,) = [text for _, text in told if text]
    assert "no GPU: CuPy cannot be imported" in text


@pytest.mark.parallel([2])
def test_a_file_that_cannot_be_written_ends_all_ranks(comm, tmp_path, capsys):
    wanted = Settings(choose_candidates(["flat"]), [Load(64)], timing=Timing(0, 1))
    with pytest.raises(SystemExit) as caught:
        # There is a folder in its place.
        measure(comm.engine, wanted, json_path=str(tmp_path))
    told = comm.allgather_obj((caught.value.code, capsys.readouterr().err))
    assert [status for status, _ in told] == [1, 1]
    (text,) = [text for _, text in told if text]
    assert "bench: writing the results failed on rank 0: IsADirectoryError" in text


def test_a_job_prints_its_table_and_nothing_else(tmp_path):
    job = run_job(
        2,
        [
            *("-m", "chainermn_ng.cli", "bench", "--model", "resnet50", *QUICK),
            *("-c", "flat", "--json", tmp_path / "b.json"),
        ],
    )
    assert job.returncode == 0, job.output
    assert re.search(r"^resnet50  102228128  float32  flat ", job.stdout, re.M)
    assert job.stdout.endswith(
        '    comm = chainermn_ng.create_communicator("flat")\n\n'
    )
    assert not job.stderr.strip() or job.stderr.startswith("bench: "), job.output
    found = read_results(tmp_path / "b.json")
    assert [one.n_arrays for one in found.rows] == [161, 161]
    write_results(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_job_with_bad_input_ends_with_status_2():
    job = run_job(2, ["-m", "chainermn_ng.cli", "bench", "-c", "flatt"])
    assert job.returncode == 2, job.output
    assert job.stdout == ""
    assert job.stderr.count("unknown communicator 'flatt'") == 1, job.output
    assert "ends the job" not in job.stderr
