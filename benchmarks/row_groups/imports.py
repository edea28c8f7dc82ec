"""How long ``import chainermn_ng`` takes beside ``import chainer`` alone."""

from __future__ import annotations

import statistics
import subprocess
import sys

from tests.helpers.jobs import job_environment

from benchmarks.results import BenchmarkError, Row, duration, quartiles
from benchmarks.settings import Settings

# Chainer imports with this much: empty stand-ins for what it asks for at import and
# that is gone. Nothing could make it cheaper; what Chainer then computes wrong is not
# repaired.
CHAINER_ALONE = """
import sys, types, numpy
distutils, info = types.ModuleType("numpy.distutils"), types.ModuleType("info")
distutils.system_info = info
numpy.distutils = distutils
sys.modules["numpy.distutils"] = distutils
sys.modules["numpy.distutils.system_info"] = info
resources = types.ModuleType("pkg_resources")
class DistributionNotFound(Exception): pass
def require(name): raise DistributionNotFound
resources.DistributionNotFound, resources.require = DistributionNotFound, require
resources.VersionConflict = DistributionNotFound
sys.modules["pkg_resources"] = resources
if not hasattr(numpy, "sctypes"):
    numpy.sctypes = {
        "int": [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
        "float": [numpy.float16, numpy.float32, numpy.float64],
    }
import chainer
"""
PROGRAMS = {"chainermn_ng": "import chainermn_ng", "chainer": CHAINER_ALONE}


def measure(row: Row, settings: Settings) -> None:
    """Fill the row: fresh processes take turns; NumPy's import counts for both."""
    rounds = 3 if settings.is_quick else settings.rounds
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    # The first round compiles what is not compiled yet, and fills the page cache.
    for i in range(-1, rounds):
        for name in list(PROGRAMS) if i % 2 else reversed(PROGRAMS):
            took = _seconds_of(PROGRAMS[name])
            if i >= 0:
                seconds[name].append(took)
    ours, alone = (statistics.median(seconds[name]) for name in PROGRAMS)
    row.seconds = seconds
    row.ours = duration(ours)
    row.peers = [duration(alone)]
    row.ratio = ours / alone
    pairs = zip(seconds["chainermn_ng"], seconds["chainer"], strict=True)
    row.spread = quartiles([a / b for a, b in pairs])
    row.notes.append(
        "Chainer alone gets empty stand-ins for the modules that it misses"
    )


def _seconds_of(program: str) -> float:
    timed = (
        f"import time; start = time.perf_counter()\n{program}\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", timed],
        env=job_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{program}: {done.stderr}")
    return float(done.stdout)
