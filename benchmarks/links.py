"""How fast the cable between two virtual hosts is, measured by iperf3."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from tests.helpers.hosts import VirtualHosts, why_no_hosts

from benchmarks.results import BenchmarkError, NotHere

#: What ``tc`` lets through, headers included.
CABLE = "1gbit"
_START_S = 10.0


def check_hosts() -> None:
    """Raise NotHere where there can be no virtual hosts or nothing measures them."""
    why_not = why_no_hosts()
    if why_not is not None:
        raise NotHere(why_not)
    if shutil.which("iperf3") is None:
        raise NotHere("iperf3 is missing; it measures what the links can carry")


def link_rate(hosts: VirtualHosts, seconds: int = 2) -> float:
    """Return the bytes of payload that one TCP stream carries a second.

    From the first host to the second, which has nothing else to do meanwhile. The
    first second is not counted: the stream only gets up to speed.

    Raises:
        BenchmarkError: iperf3 failed.
    """
    _, client, server = hosts.namespaces[:3]
    listener = subprocess.Popen(
        [*server.enter(), "iperf3", "--server", "--one-off"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    command = [*client.enter(), "iperf3", "--json", "--client", server.name]
    command += ["--time", str(seconds), "--omit", "1"]
    deadline = time.monotonic() + _START_S
    try:
        while True:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds + _START_S,
                check=False,
            )
            report = json.loads(done.stdout)
            # With --json it exits with 0 all the same.
            if "error" not in report:
                return rate_in(report)
            # The server may not listen yet.
            if time.monotonic() > deadline:
                raise BenchmarkError(f"iperf3: {report['error']}")
            time.sleep(0.1)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"iperf3 did not end: {error}") from error
    finally:
        hosts.end_processes()
        listener.wait()


def rate_in(report: Mapping[str, Any]) -> float:
    """Return the bytes a second that the server received, of iperf3's report."""
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


def link_seconds(n_hosts: int, nbytes: int, rate: float) -> float:
    """Return what an all-reduce between hosts needs on the link alone.

    Each host has to send, and to receive, ``2 (1 - 1/N)`` times the bytes.

    Args:
        n_hosts: N.
        nbytes: of the arrays that are reduced.
        rate: bytes a second and direction, see :func:`link_rate`.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009, theorem 1.
    """
    return 2 * (1 - 1 / n_hosts) * nbytes / rate
