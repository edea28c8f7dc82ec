import pathlib
import random
import re
import time

from helpers.jobs import REPOSITORY, run_job
from helpers.reports import report_of

PROGRAM = pathlib.Path(__file__).parent / "programs" / "kill_writers.py"
N_KILLS = 50


def test_a_kill_at_any_moment_leaves_a_set_that_loads(tmp_path):
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    env = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    began = time.monotonic()

    # A rank of a real job kills itself while it saves.
    job = run_job(2, [PROGRAM, tmp_path, "save", seed], timeout_s=40, env=env)
    assert job.returncode != 0, job.output
    saved = [int(number) for number in re.findall(r"^saved (\d+)$", job.stdout, re.M)]
    assert saved, job.output

    # Another real job loads that, and what other killed writers leave behind.
    argv = [PROGRAM, tmp_path, "fork", seed, N_KILLS, max(saved)]
    report, _ = report_of(run_job(2, argv, timeout_s=75, env=env))
    print(f"{report} in {time.monotonic() - began:.1f} s")
    assert report["saved"] >= N_KILLS
    # The kills did strike in the middle of writing.
    assert report["left"].get("temporary", 0) >= N_KILLS // 10, report
    assert set(report["left"]) <= {"temporary", "half a set"}, report
    # What they left is gone after the next set.
    assert report["at last"] == [], report
