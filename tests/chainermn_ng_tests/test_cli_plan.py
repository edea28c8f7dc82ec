"""``chainermn-ng plan``: options, units, tables, files, and constants from a bench."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest
from click.testing import CliRunner
from helpers.jobs import run_command

from chainermn_ng.cli.group import chainermn_ng
from chainermn_ng.cli.measured_rows import fit_measured, read_measured
from communicators.bench_results import Results, Row, read_results, write_results
from communicators.cost_fit import Measurement
from communicators.cost_model import Cluster
from communicators.cost_presets import PRESETS
from communicators.cost_search import Training

CLUSTER = ["--hosts", "2", "--gpus-per-host", "4"]
LINKS = ["--intra-bandwidth", "30GB/s", "--inter-bandwidth", "100Gbit/s"]
TRUE = Cluster(
    2,
    2,
    intra_bytes_s=5e9,
    inter_bytes_s=1.17e8,
    intra_latency_s=2e-5,
    inter_latency_s=1.5e-4,
    call_s=0.0,
    is_striped=False,
)


def run(*arguments):
    return CliRunner().invoke(chainermn_ng, ["plan", *map(str, arguments)])


def planned(*arguments):
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def error_of(*arguments):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    return result.output


def whole_cluster(content):
    most = max(row["ranks"] for row in content["rows"])
    return {r["communicator"]: r for r in content["rows"] if r["ranks"] == most}


def write_bench(path, topology="2x2", n_real=None, rows=None, device="cpu"):
    """Write rows, by default with the times that the model gives with ``TRUE``."""
    hosts, ranks = map(int, topology.split("x"))
    found = []
    for name in ("flat", "hierarchical", "two_dimensional"):
        for nbytes in (2**10, 2**14, 2**18, 2**22, 2**26):
            # Between hosts in buckets of 4 MiB.
            n = max(1, nbytes // 2**22) if hosts > 1 else 1
            seconds = Measurement(name, hosts, ranks, nbytes, 1.0, n).model_s(TRUE)
            times = (seconds, 0.9 * seconds, 5 * seconds)
            found.append(
                Row(name, "allreduce_arrays", "float32", nbytes, times_s=times)
            )
    machine = {
        "ranks": hosts * ranks,
        "topology": topology,
        "hosts": [{"name": f"h{i}"} for i in range(n_real or hosts)],
        "device": device,
    }
    write_results(path, Results("today", machine, {}, found if rows is None else rows))
    return path


def test_tables_show_what_json_holds(tmp_path):
    picture = tmp_path / "plan.png"
    file = tmp_path / "plan.json"
    result = run(
        *("--cluster", "ddl-2017", "--compute-time", "0.2s", "--overlap", "0.1"),
        *("--plot", picture, "--json", file),
    )
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert content["schema"] == "chainermn-ng plan"
    rows = whole_cluster(content)
    for name, row in rows.items():
        assert name in result.output
        assert f"{row['efficiency']:.1%}" in result.output
    assert content["recommended"] in result.output.splitlines()[-1]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rank_counts_go_from_one_to_the_whole_cluster():
    rows = planned(*CLUSTER, *LINKS, "--compute-time", "1s")["rows"]
    shapes = sorted({(r["ranks"], r["hosts"]) for r in rows})
    assert shapes == [(1, 1), (2, 1), (4, 1), (8, 2)]
    for row in rows:
        assert 0 < row["efficiency"] <= 1
        assert row["step_s"] == pytest.approx(1 / row["efficiency"])


def test_without_a_compute_time_there_are_no_steps():
    result = run(*CLUSTER, *LINKS)
    assert "efficiency" not in result.output.lower()
    assert {row["step_s"] for row in planned(*CLUSTER, *LINKS)["rows"]} == {None}


def test_bits_are_eighths_of_bytes_and_every_unit_is_read():
    cluster = planned(
        *CLUSTER,
        *("--intra-bandwidth", "30GB/s", "--inter-bandwidth", "100Gbit/s"),
        *("--intra-latency", "3us", "--inter-latency", "0.02ms", "--nics", "2"),
        *("--flow-limit", "10GiB/s", "--call-time", "1e3ns"),
    )["cluster"]
    assert cluster["intra_bytes_s"] == 30e9
    assert cluster["inter_bytes_s"] == 12.5e9
    assert cluster["flow_bytes_s"] == 10 * 2**30
    assert cluster["nics"] == 2
    for field, seconds in (("intra", 3e-6), ("inter", 2e-5)):
        assert cluster[f"{field}_latency_s"] == pytest.approx(seconds)
    assert cluster["call_s"] == pytest.approx(1e-6)


def test_the_wire_dtype_changes_the_bytes_and_the_script():
    whole, half = (
        planned(*CLUSTER, *LINKS, *extra) for extra in ((), ("--wire-dtype", "float16"))
    )
    assert whole["load"]["nbytes"] == 4 * 25_557_032
    assert half["load"]["nbytes"] == 2 * 25_557_032
    assert 'allreduce_grad_dtype="float16"' in half["recommended"]
    assert "allreduce_grad_dtype" not in whole["recommended"]


def test_the_recommended_line_makes_that_communicator():
    content = planned("--cluster", "cpu-10gbe", "--communicator", "multi_ring")
    choice = whole_cluster(content)["multi_ring"]
    called = {}

    class Namespace:
        @staticmethod
        def create_communicator(name, **options):
            called.update(options, name=name)

    exec(content["recommended"], {"chainermn_ng": Namespace})
    assert called["name"] == "multi_ring"
    assert list(called["dims"]) == choice["dims"]
    most = content["load"]["nbytes"] / choice["n_pieces"]
    assert most <= called["bucket_bytes"] < most + 1024


def test_what_is_given_changes_a_cluster_by_name():
    cluster = planned("--cluster", "h100", "--hosts", "4", "--nics", "1")["cluster"]
    assert (cluster["hosts"], cluster["nics"]) == (4, 1)
    assert cluster["intra_bytes_s"] == PRESETS["h100"].cluster.intra_bytes_s


def test_buckets_that_overlap_are_several():
    arguments = [*CLUSTER, *LINKS, "--compute-time", "1s"]
    alone = whole_cluster(planned(*arguments))
    beside = whole_cluster(planned(*arguments, "--overlap", "0.5"))
    assert alone["pure_nccl"]["n_pieces"] == 1
    assert all(row["n_pieces"] >= 4 for row in beside.values() if row != "naive")


def test_the_cpu_has_communicators_of_its_own():
    arguments = ["--device", "cpu", *CLUSTER, *LINKS]
    content = planned(*arguments)
    assert "pure_nccl" not in whole_cluster(content)
    assert content["cluster"]["shared_memory"] is True
    assert "on the CPU there are flat" in error_of(
        *arguments, "--communicator", "pure_nccl"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing --hosts, --gpus-per-host, --intra-bandwidth, --inter-bandwidth"),
        (["--hosts", "1", "--gpus-per-host", "2"], "missing --intra-bandwidth; or"),
        (["--cluster", "cray"], "'cray' is not one of"),
        (["--cluster", "h100", "--inter-bandwidth", "100Gb/s"], "no unit 'Gb/s'"),
        (["--cluster", "h100", "--inter-bandwidth", "100"], "it has no unit; write"),
        (["--cluster", "h100", "--inter-bandwidth", "fast"], "no bandwidth; write"),
        (["--cluster", "h100", "--inter-bandwidth", "0GB/s"], "bandwidth is above 0"),
        (["--cluster", "h100", "--compute-time", "0s"], "expected more than 0 s"),
        (["--cluster", "h100", "--compute-time", "390"], "390ms or 15us"),
        (["--cluster", "h100", "--model", "alexnet"], "resnet50, transformer-base"),
        (["--cluster", "h100", "--overlap", "1.5"], "1.5 is not in the range"),
        (["--cluster", "h100", "--hosts", "0"], "0 is not in the range"),
        (["--cluster", "h100", "--plot", "a.xyz"], "ends in .png, .pdf, .svg"),
        (["--cluster", "h100", "--json", "no/such/a.json"], "there is no folder"),
        (["--cluster", "h100", "--plot", "no/such/a.png"], "there is no folder"),
        (["--cluster", "h100", "--json", "/"], "is a directory"),
    ],
)
def test_mistakes_are_told(arguments, words):
    output = " ".join(error_of(*arguments).split())
    assert words in output, output
    # Before anything is shown.
    assert "Predicted" not in output


def test_constants_come_from_a_bench(tmp_path):
    bench = write_bench(tmp_path / "bench.json")
    result = run("--from", bench)
    assert "bandwidth between hosts" in result.output
    assert "Residual 0.0%" in result.output
    content = planned("--from", bench)
    assert content["device"] == "cpu"
    assert (content["cluster"]["hosts"], content["cluster"]["ranks_per_host"]) == (2, 2)
    for name, value in content["fit"]["fitted"].items():
        assert value == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert content["cluster"]["shared_memory"] is False
    # And then say something of more hosts.
    larger = planned("--from", bench, "--hosts", "8", "--intra-bandwidth", "5GB/s")
    assert "intra_bytes_s" not in larger["fit"]["fitted"]
    assert max(row["ranks"] for row in larger["rows"]) == 16


def test_files_of_several_shapes_are_fitted_together(tmp_path):
    files = [
        *("--from", write_bench(tmp_path / "one.json", "1x4")),
        *("--from", write_bench(tmp_path / "four.json", "4x1")),
    ]
    fitted = planned(*files)["fit"]["fitted"]
    assert {n: pytest.approx(v, rel=1e-3) for n, v in fitted.items()} == {
        name: getattr(TRUE, name) for name in fitted
    }
    assert len(fitted) == 4


def test_a_poor_fit_is_told(tmp_path):
    good = run("--from", write_bench(tmp_path / "good.json", "1x4"))
    assert "does not describe" not in good.output
    rows = read_results(tmp_path / "good.json").rows
    noisy = [
        dataclasses.replace(row, times_s=[row.time_s * (1 + 0.5 * (-1) ** i)])
        for i, row in enumerate(rows)
    ]
    poor = run("--from", write_bench(tmp_path / "poor.json", "1x4", rows=noisy))
    assert "does not describe these rows well" in poor.output


def test_a_pretended_topology_is_told(tmp_path):
    bench = write_bench(tmp_path / "bench.json", n_real=1)
    assert "topology 2x2 was pretended" in run("--from", bench).output


def test_rows_of_networks_count_in_buckets_and_chunks(tmp_path):
    common = {"operation": "allreduce_arrays", "dtype": "float32", "times_s": (1.0,)}
    row = Row("flat", nbytes=4 * 25_557_032, load="resnet50", n_arrays=161, **common)
    rows = [
        row,
        dataclasses.replace(row, options={"bucket_bytes": 2**30}),
        dataclasses.replace(row, communicator="multi_ring", options={"n_chunks": 1}),
        dataclasses.replace(row, wire_dtype="float16"),
        dataclasses.replace(row, communicator="mpi"),
        dataclasses.replace(row, communicator="dummy"),
        dataclasses.replace(row, times_s=(), skipped="too slow"),
    ]
    bench = write_bench(tmp_path / "bench.json", rows=rows)
    default, whole, ring, half = read_measured(str(bench)).measurements
    assert whole.n_pieces == 1
    assert 25 <= default.n_pieces <= 40
    assert ring.n_pieces == default.n_pieces
    assert ring.dims == (2, 2)
    assert half.nbytes * 2 == default.nbytes
    # In one host nothing is packed.
    one_host = write_bench(tmp_path / "one.json", "1x4", rows=[row])
    assert read_measured(str(one_host)).measurements[0].n_pieces == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no row for the model, which takes allreduce_arrays"),
        (
            [Row("mpi", "bcast", "float32", 8, times_s=(1.0,))],
            "it has bcast of mpi",
        ),
        (
            [Row("flat", "allreduce_arrays", "float32", 8, times_s=(1.0,))],
            "rows of 1 size; latency and bandwidth need two or more",
        ),
    ],
)
def test_a_bench_that_does_not_suffice_is_an_error(tmp_path, rows, words):
    bench = write_bench(tmp_path / "bench.json", rows=rows)
    assert words in error_of("--from", bench)


def test_no_link_is_made_up(tmp_path):
    bench = write_bench(tmp_path / "bench.json", "1x4")
    output = error_of("--from", bench, "--hosts", "4")
    assert "the rows say nothing of links between hosts" in output
    given = planned("--from", bench, "--hosts", "4", "--inter-bandwidth", "1Gbit/s")
    assert given["cluster"]["inter_bytes_s"] == 125e6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other"}'])
def test_a_file_of_something_else_is_told(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    output = error_of("--from", path)
    assert "--from: " in output
    assert "bench.json" in output


def test_it_starts_no_mpi():
    code = (
        "import sys; from chainermn_ng.cli.main import main\n"
        "try: main(['plan', '--cluster', 'h100'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    result = run_command([sys.executable, "-c", code])
    assert result.returncode == 0, result.output
    assert "Recommended" in result.stdout


TWO_HOSTS = pathlib.Path(__file__).parents[1] / "data" / "bench_two_hosts.json"


def test_the_model_foretells_a_training_on_two_hosts(tmp_path):
    """Constants from single arrays, then the efficiency with a network's gradients.

    The file is of two virtual hosts on one machine (two cores), with two ranks each and
    links of 1 Gbit/s: rows of single arrays of several sizes and of a network, by
    several communicators.
    """
    results = read_results(TWO_HOSTS)
    rows = [row for row in results.rows if row.operation == "allreduce_arrays"]
    single = tmp_path / "single.json"
    write_results(
        single,
        dataclasses.replace(results, rows=[row for row in rows if row.load is None]),
    )
    fit = fit_measured(
        Cluster(2, 2, 1e9, 1e9, is_striped=False),
        [read_measured(str(single))],
        (),
        None,
    )
    assert 0.8 * 125e6 < fit.cluster.inter_bytes_s < 1.05 * 125e6
    network = tmp_path / "network.json"
    write_results(
        network, dataclasses.replace(results, rows=[row for row in rows if row.load])
    )
    measured = read_measured(str(network)).measurements
    # As much computing as the fastest communicator needs: half of the time is lost.
    training = Training(compute_s=min(one.seconds for one in measured))
    for one in measured:
        foretold = training.efficiency(one.model_s(fit.cluster), 4)
        found = training.efficiency(one.seconds, 4)
        assert foretold == pytest.approx(found, rel=0.1), one
