"""How fast the cable between two virtual hosts is, measured by iperf3."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.helpers.hosts import VirtualHosts, why_no_hosts
from tests.helpers.namespaces import Namespace

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

    From the first host to the second, while nothing else is on the cables.

    Args:
        hosts: two or more.
        seconds: how long to measure.

    Raises:
        BenchmarkError: iperf3 failed.
    """
    first, second = hosts.namespaces[1:3]
    return min(_streams(hosts, [(first, second)], seconds))


def ring_rate(hosts: VirtualHosts, seconds: int = 2) -> float:
    """Return what the slowest stream carries when each host sends to the next one.

    All links are busy in both directions then, as in an all-reduce; what a machine
    can't do at once shows here.
    """
    machines = hosts.namespaces[1:]
    after = machines[1:] + machines[:1]
    return min(_streams(hosts, list(zip(machines, after, strict=True)), seconds))


def _streams(
    hosts: VirtualHosts,
    routes: Sequence[tuple[Namespace, Namespace]],
    seconds: int,
) -> list[float]:
    """Run a stream on each route at once; return the bytes a second of each.

    Args:
        routes: who sends to whom. Nobody receives twice.
    """
    listeners = [
        _start([*receiver.enter(), "iperf3", "--server"]) for _, receiver in routes
    ]
    try:
        with ThreadPoolExecutor(len(routes)) as pool:
            return list(
                pool.map(lambda route: _stream(route[0], route[1], seconds), routes)
            )
    finally:
        hosts.end_processes()
        for listener in listeners:
            listener.wait()


@contextlib.contextmanager
def busy_links(hosts: VirtualHosts) -> Iterator[None]:
    """Keep the cables of two hosts busy in both directions; ends all that runs there.

    Args:
        hosts: two.
    """
    first, second = hosts.namespaces[1:3]
    running = [
        _start([*host.enter(), "iperf3", "--server"]) for host in (first, second)
    ]
    try:
        for sender, receiver in ((first, second), (second, first)):
            # Until the receiver listens.
            _stream(sender, receiver, 1)
            command = ["iperf3", "--client", receiver.name, "--time", "0"]
            running.append(_start([*sender.enter(), *command]))
        time.sleep(1)
        yield
    finally:
        hosts.end_processes()
        for process in running:
            process.wait()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def _stream(sender: Namespace, receiver: Namespace, seconds: int) -> float:
    command = [*sender.enter(), "iperf3", "--json", "--client", receiver.name]
    # The first second is left out: a stream only gets up to speed.
    command += ["--time", str(seconds), "--omit", "1"]
    deadline = time.monotonic() + _START_S
    while True:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds + _START_S,
                check=False,
            )
            report = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            raise BenchmarkError(f"iperf3: {error}") from error
        # With --json it may exit with 0 all the same.
        if "error" not in report:
            return rate_in(report)
        # The server may not listen yet.
        if time.monotonic() > deadline:
            raise BenchmarkError(f"iperf3: {report['error']}")
        time.sleep(0.1)


def rate_in(report: Mapping[str, Any]) -> float:
    """Return the bytes a second that the server received, of iperf3's report."""
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


def megabits(rate: float) -> str:
    """Return a rate in bytes a second as Mbit/s, without the unit."""
    return f"{rate * 8e-6:.0f}"


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
