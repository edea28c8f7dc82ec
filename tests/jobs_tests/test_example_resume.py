"""Training that is interrupted goes on as if it had not been; also on clusters."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import pytest
from helpers.example_programs import EXAMPLES, accepted_flags, digests, read_log
from helpers.jobs import REPOSITORY, job_environment, mpiexec, run_command, run_job

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

PROGRAM = "examples/resume/train_resume.py"
BATCH_SCRIPT = EXAMPLES / "slurm" / "train_resume.sh"
KUBERNETES = EXAMPLES / "kubernetes"


def ranks_below(pid: int) -> list[int]:
    """Return the processes of the program that an mpiexec has started."""
    parents, found = {}, []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        process = int(folder.name)
        parents[process] = int(re.search(r"^PPid:\s+(\d+)", status, re.M)[1])
        if b"python" in words[0] and PROGRAM.encode() in words:
            found.append(process)

    def is_below(process: int) -> bool:
        while process > 1 and process != pid:
            process = parents.get(process, 0)
        return process == pid

    return sorted(process for process in found if is_below(process))


def interrupted_run(out: pathlib.Path) -> tuple[int, str]:
    """Train without end, and send one of two ranks SIGTERM in the second epoch.

    Returns:
        tuple: exit status, and all output.
    """
    argv = [mpiexec(), "-n", "2", sys.executable, PROGRAM, "--smoke"]
    process = subprocess.Popen(
        [*argv, "--epoch", "1000000", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=job_environment(),
        cwd=REPOSITORY,
        start_new_session=True,
    )
    lines = []
    # Ends the reading below, however silent the job is.
    limit = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if re.match(r"(\x1b\[J)?1 +15 ", line):
                _, second = ranks_below(process.pid)
                os.kill(second, signal.SIGTERM)
        return process.wait(timeout=30), "".join(lines)
    finally:
        limit.cancel()
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def submit(out: pathlib.Path, folder: pathlib.Path, argv: list[str], **env: str):
    """Run the batch script as Slurm would, on two ranks, with a queue of its own.

    ``srun`` and ``scontrol`` are small scripts in ``folder``: where there is no Slurm,
    what the batch script asks of it can be looked at all the same.
    """
    folder.mkdir()
    for name, text in {
        "srun": 'echo "srun: $*"; exit "${STATUS:-1}"',
        "scontrol": 'echo "scontrol: $*"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = [str(folder), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    env = {
        "PATH": os.pathsep.join(path),
        "VENV": str(folder),
        "OUT": str(out),
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
        **env,
    }
    return run_command(
        ["bash", str(BATCH_SCRIPT), *argv], timeout_s=90, env=env, cwd=REPOSITORY
    )


@pytest.mark.timeout(240)
def test_interrupted_training_goes_on_with_the_same_bits(tmp_path):
    status, output = interrupted_run(tmp_path / "broken")
    assert status == os.EX_TEMPFAIL, output
    iteration = int(re.search(r"^interrupted at iteration (\d+)$", output, re.M)[1])

    argv = ["--smoke", "--epoch", str(iteration // 14 + 2)]
    resumed = submit(tmp_path / "broken", tmp_path / "bin", argv, MPI_TYPE="mpiexec")
    assert resumed.returncode == 0, resumed.output
    assert f"resumed at iteration {iteration}\n" in resumed.stdout

    argv = [PROGRAM, *argv, "--out", str(tmp_path / "whole")]
    whole = run_job(2, argv, timeout_s=90, cwd=REPOSITORY)
    assert whole.returncode == 0, whole.output
    assert "resumed" not in whole.stdout
    assert digests(resumed) == digests(whole)
    assert len(set(digests(whole))) == 1
    broken_log, whole_log = read_log(tmp_path / "broken"), read_log(tmp_path / "whole")
    for entry in broken_log + whole_log:
        del entry["elapsed_time"]
    assert broken_log == whole_log


def test_complete_runs_say_so_and_leave_other_sizes_alone(tmp_path):
    """Without ``--out``: each kind of run has a folder of its own."""

    def train(*argv):
        run = run_job(1, [REPOSITORY / PROGRAM, *argv], timeout_s=90, cwd=tmp_path)
        assert run.returncode == 0, run.output
        return run

    first, again = train("--smoke"), train("--smoke")
    assert "resumed" not in first.stdout
    (epoch, iteration), *_ = re.findall(r"^(?:\x1b\[J)?(3) +(\d+) ", first.stdout, re.M)
    assert epoch == "3"
    assert f"nothing left to do; resumed at iteration {iteration}\n" in again.stdout
    assert digests(again) == digests(first)
    assert "resumed" not in train("--epoch", "1").stdout


def test_batch_script_can_be_parsed():
    run = run_command(["bash", "-n", str(BATCH_SCRIPT)], timeout_s=20)
    assert run.returncode == 0, run.output
    lines = BATCH_SCRIPT.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert len(options) > 5
    # Slurm reads them up to the first command.
    first_command = next(i for i, line in enumerate(lines) if line[:1] not in ("#", ""))
    assert all(lines.index(option) < first_command for option in options)


@pytest.mark.parametrize("status", [0, 1, 75])
def test_batch_script_goes_back_into_the_queue(status, tmp_path):
    job = submit(
        tmp_path / "out",
        tmp_path / "bin",
        ["--epoch", "3"],
        STATUS=str(status),
        SLURM_CPUS_PER_TASK="8",
        SLURM_GPUS_ON_NODE="4",
    )
    srun, *rest = job.stdout.splitlines()
    assert srun.startswith("srun: --mpi=pmix --cpus-per-task=8 ")
    assert f"python {PROGRAM} --out {tmp_path / 'out'} --epoch 3 --gpu" in srun
    if status == 75:
        assert job.returncode == 0
        assert rest[-1] == "scontrol: requeue 17"
    else:
        assert job.returncode == status
        assert rest == []


def test_kubernetes_files_name_what_exists():
    text = (KUBERNETES / "mpijob.yaml").read_text()
    assert "\t" not in text
    program = re.search(r"^ +- /opt/chainermn_ng/(examples/\S+\.py)$", text, re.M)[1]
    known = accepted_flags((REPOSITORY / program).read_text())
    arguments = text[text.index(program) :].split("resources:")[0]
    flags = re.findall(r"^ +- (--\S+)$", arguments, re.M)
    assert "--out" in flags
    assert known >= set(flags)
    replicas = re.findall(r"replicas: (\d+)", text)
    (ranks,) = re.findall(r'^ +- -n\n +- "(\d+)"$', text, re.M)
    (slots,) = re.findall(r"slotsPerWorker: (\d+)", text)
    assert int(ranks) == int(replicas[1]) * int(slots)
    # What the image copies and installs, and where the manifest looks for it.
    dockerfile = (KUBERNETES / "Dockerfile").read_text()
    for path in "/opt/chainermn_ng", "/opt/venv", "/home/mpiuser/.sshd_config":
        assert path in text
        assert path in dockerfile
    assert (REPOSITORY / re.search(r"PIP_CONSTRAINT=(\S+)", dockerfile)[1]).exists()


def test_manifest_can_be_parsed():
    yaml = pytest.importorskip("yaml", reason="only to parse the manifest")
    manifest = yaml.safe_load((KUBERNETES / "mpijob.yaml").read_text())
    assert manifest["apiVersion"] == "kubeflow.org/v2beta1"
    assert manifest["kind"] == "MPIJob"
    specs = manifest["spec"]["mpiReplicaSpecs"]
    assert set(specs) == {"Launcher", "Worker"}
    for spec in specs.values():
        (container,) = spec["template"]["spec"]["containers"]
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        volumes = spec["template"]["spec"].get("volumes", [])
        assert mounts == {volume["name"] for volume in volumes}
        assert all(isinstance(word, str) for word in container["args"])


def test_pattern_of_the_hook_finds_the_program_and_not_itself():
    """A shell whose own command line matched would wait for itself for ever."""
    pattern = "[t]rain_resume[.]py"
    assert f"pkill -TERM -f '{pattern}'" in (KUBERNETES / "mpijob.yaml").read_text()
    assert re.search(pattern, f"python /opt/chainermn_ng/{PROGRAM}")
    assert not re.search(pattern, f"sh -c pkill -TERM -f '{pattern}'; sleep 1")
