"""Several hosts on one machine, joined by virtual network cables, and jobs on them.

The hosts are namespaces (see :mod:`.namespaces`). All hang on one switch, which is a
bridge in a namespace of its own: nothing is added to the machine's own network, and
its firewall rules see none of the traffic.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .jobs import JobResult, is_open_mpi, job_environment, mpiexec
from .namespaces import LinkBytes, Namespace, why_no_hosts

__all__ = [
    "JobTimeoutError",
    "VirtualHosts",
    "run_on_hosts",
    "run_until_failure",
    "virtual_hosts",
    "why_no_hosts",
]

_serial = itertools.count()


class JobTimeoutError(AssertionError):
    """A job outlived its time limit; nothing of it runs any more.

    Attributes:
        running: the command lines that still ran.
    """

    def __init__(self, text: str, running: list[str]) -> None:
        super().__init__(text)
        self.running = running


class VirtualHosts:
    """Running hosts; made by :func:`virtual_hosts`.

    Attributes:
        names: host names, in order.
        namespaces: the switch, then the hosts; each has the ``pid`` of its keeper.
        directory: files of the hosts' own; goes with them.
        agent: the script that stands in for ssh.
    """

    def __init__(self, n_hosts: int, rate: str | None) -> None:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.directory = pathlib.Path(tempfile.mkdtemp(prefix="hosts-"))
            stack.callback(shutil.rmtree, self.directory)
            prefix = f"v{os.getpid()}x{next(_serial)}"
            self.names = [f"{prefix}host{i}" for i in range(n_hosts)]
            addresses = [f"10.77.0.{i + 2}" for i in range(n_hosts)]
            (self.directory / "tmp").mkdir()
            table = ["127.0.0.1 localhost", f"10.77.0.1 {prefix}switch"]
            table += map(" ".join, zip(addresses, self.names, strict=True))
            (self.directory / "hosts").write_text("\n".join(table) + "\n")

            def start(name: str) -> Namespace:
                namespace = Namespace(name, self.directory)
                stack.callback(namespace.close)
                return namespace

            self._switch = start(f"{prefix}switch")
            self._hosts = [start(name) for name in self.names]
            self.namespaces = (self._switch, *self._hosts)
            _make_switch(self._switch)
            for i, (host, address) in enumerate(
                zip(self._hosts, addresses, strict=True)
            ):
                _plug_in(self._switch, f"port{i}", host, address, rate)
            self.agent = self._write_agent()
            self._stack = stack.pop_all()

    def _write_agent(self) -> pathlib.Path:
        """Write what stands in for ssh: ``AGENT HOST COMMAND...``."""
        cases = "\n".join(
            f'{host.name}) set -- {shlex.join(host.enter())} sh -c "$*" ;;'
            for host in self._hosts
        )
        agent = self.directory / "agent"
        agent.write_text(
            "#!/bin/sh\n"
            "# Options of ssh that come before the host have no meaning here.\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            'host="$1"; shift\n'
            f'case "$host" in\n{cases}\n'
            '*) echo "no such virtual host: $host" >&2; exit 255 ;;\nesac\n'
            'exec "$@"\n'
        )
        agent.chmod(0o755)
        return agent

    def link_bytes(self, host: int) -> LinkBytes:
        """Return what the network card of host number ``host`` has counted so far."""
        return self._hosts[host].link_bytes()

    def processes(self) -> list[int]:
        """Return the ids of all processes on the hosts and on the switch."""
        return [p for n in self.namespaces for p in n.processes()]

    def commands(self) -> list[str]:
        """Return ``HOST: COMMAND LINE`` of all processes on the hosts."""
        found = []
        for namespace in self.namespaces:
            for pid in namespace.processes():
                # It may end while it is looked at.
                with contextlib.suppress(OSError):
                    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                    text = words.replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{namespace.name}: {text.strip()}")
        return found

    def end_processes(self, timeout_s: float = 10.0) -> None:
        """Kill what runs on these hosts, by id, and wait until it is gone."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes outlive SIGKILL: {left}")
            time.sleep(0.02)

    def run_on_switch(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str]
    ) -> JobResult:
        """Run a command beside the hosts, on the machine that may start jobs there.

        Raises:
            JobTimeoutError: it did not end within ``timeout_s``; the text holds what
                it printed.
        """
        start = time.monotonic()
        process = subprocess.Popen(
            # Not on a host of its own: the agent needs the machine's /proc.
            [*self._switch.enter_network(), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            # Launchers keep sockets and session files here; they go with the hosts.
            env={**env, "TMPDIR": str(self.directory / "tmp")},
            start_new_session=True,
        )
        running = None
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            running = self.commands()
        finally:
            self.end_processes()
            if process.poll() is None:
                process.kill()
            # Returns what was read before as well.
            stdout, stderr = process.communicate(timeout=10)
        if running is not None:
            raise JobTimeoutError(
                f"{shlex.join(command)} did not end within {timeout_s} s\n"
                f"{stdout}\n--- stderr\n{stderr}\n--- running\n{chr(10).join(running)}",
                running,
            )
        seconds = time.monotonic() - start
        return JobResult(process.returncode, stdout, stderr, seconds)

    def close(self) -> None:
        """Remove the hosts, the switch, the cables and the files."""
        self._stack.close()


def _make_switch(switch: Namespace) -> None:
    # The name eth0 lets one -iface option serve the launcher and the hosts.
    run = switch.network_command
    run("ip", "link", "add", "name", "eth0", "type", "bridge")
    run("ip", "address", "add", "10.77.0.1/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")


def _plug_in(
    switch: Namespace, port: str, host: Namespace, address: str, rate: str | None
) -> None:
    """Connect a host's eth0 with a port of the switch, shaped at both ends."""
    peer = ("peer", "name", "eth0", "netns", str(host.pid))
    switch.network_command("ip", "link", "add", "name", port, "type", "veth", *peer)
    switch.network_command("ip", "link", "set", port, "master", "eth0", "up")
    host.network_command("ip", "address", "add", f"{address}/24", "dev", "eth0")
    host.network_command("ip", "link", "set", "eth0", "up")
    if rate is not None:
        # The burst must hold one 64 KiB packet of segmentation offload.
        shape = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        for end, device in ((switch, port), (host, "eth0")):
            end.network_command("tc", "qdisc", "add", "dev", device, "root", *shape)


@contextlib.contextmanager
def virtual_hosts(n_hosts: int, rate: str | None = None) -> Iterator[VirtualHosts]:
    """Make hosts that share a switch, and remove them at the end.

    Args:
        n_hosts: 1 to 250.
        rate: what each host's cable carries per direction, as ``tc`` writes it
            (``"1gbit"``); None for as much as the machine can.

    Raises:
        RuntimeError: a host or a cable could not be made; what was made is gone again.
    """
    if not 1 <= n_hosts <= 250:
        raise ValueError(f"n_hosts is {n_hosts}; expected 1 to 250")
    hosts = VirtualHosts(n_hosts, rate)
    try:
        yield hosts
    finally:
        hosts.close()


def run_on_hosts(
    hosts: VirtualHosts,
    ranks_per_host: int | Sequence[int],
    argv: Sequence[str],
    *,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> JobResult:
    """Run ``python *argv`` over the hosts with the MPI of this Python's mpi4py.

    Ranks go host by host: with ``[2, 1]`` ranks 0 and 1 are on host 0, rank 2 on
    host 1. When this returns or raises, nothing of the job runs any more.

    Args:
        hosts: from :func:`virtual_hosts`.
        ranks_per_host: one number for all hosts, or one a host; hosts with 0 are left
            out.
        argv: a script and its arguments, or ``["-c", code]``.
        timeout_s: the job's time limit in seconds.
        env: variables to set for the ranks.

    Raises:
        JobTimeoutError: the job did not end within ``timeout_s``.
    """
    if isinstance(ranks_per_host, int):
        ranks_per_host = [ranks_per_host] * len(hosts.names)
    if len(ranks_per_host) != len(hosts.names):
        raise ValueError(f"{ranks_per_host} for {len(hosts.names)} hosts")
    slots = ",".join(
        f"{name}:{n}"
        for name, n in zip(hosts.names, ranks_per_host, strict=True)
        if n > 0
    )
    launcher: Callable[[str, pathlib.Path], tuple[list[str], dict[str, str]]]
    launcher = _open_mpi_launcher if is_open_mpi() else _mpich_launcher
    options, mpi_env = launcher(slots, hosts.agent)
    return hosts.run_on_switch(
        [
            *(mpiexec(), *options, "-n", str(sum(ranks_per_host))),
            *(sys.executable, *map(str, argv)),
        ],
        timeout_s=timeout_s,
        env={**job_environment(), **mpi_env, **(env or {})},
    )


def run_until_failure(
    hosts: VirtualHosts,
    ranks_per_host: int | Sequence[int],
    argv: Sequence[str],
    *,
    timeout_s: float = 15.0,
) -> JobResult:
    """Run a job in which a rank fails, and return how it ended.

    Open MPI's launcher (seen with PRRTE 3.0.14) overlooks the end of about one job in
    fifty in which one rank is killed while others abort: no rank is left, and it waits
    on. The job then runs once more, as what is tested is that the ranks end.

    Raises:
        JobTimeoutError: ranks, or another launcher, did not end within ``timeout_s``.
    """
    for _ in range(3):
        try:
            return run_on_hosts(hosts, ranks_per_host, argv, timeout_s=timeout_s)
        except JobTimeoutError as error:
            rank = f": {sys.executable} {argv[0]}"
            if not is_open_mpi() or any(rank in line for line in error.running):
                raise
            last = error
    raise last


def _mpich_launcher(
    slots: str, agent: pathlib.Path
) -> tuple[list[str], dict[str, str]]:
    options = ["-launcher", "ssh", "-launcher-exec", str(agent)]
    options += ["-hosts", slots, "-iface", "eth0"]
    # Left alone, UCX takes ways between processes that hosts do not have.
    return options, {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
    }


def _open_mpi_launcher(
    slots: str, agent: pathlib.Path
) -> tuple[list[str], dict[str, str]]:
    options = ["--prtemca", "plm_ssh_agent", str(agent), "--host", slots]
    options += ["--prtemca", "prte_if_include", "eth0"]
    options += ["--map-by", "slot:oversubscribe", "--bind-to", "none"]
    options += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    options += ["--mca", "btl_tcp_if_include", "eth0"]
    # Every host takes all of the machine's cores for its own, so Open MPI does not see
    # that they are shared and would spin while it waits.
    options += ["--mca", "mpi_yield_when_idle", "1"]
    return options, {}
