"""Several hosts on one machine: Linux namespaces joined by virtual network cables.

Each host has its own network, host name, ``/dev/shm``, System V memory and process
numbers, so that ranks on two hosts can reach each other over the network only. All
hosts hang on one switch, which is a bridge in a namespace of its own: nothing is
added to the machine's own network, and its firewall rules see none of the traffic.

No namespace has a name in ``/run/netns``. Each lives as long as a process that waits
for the end of a pipe, and this process holds the pipe's other end; so everything goes
when the context ends, and also when this process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .jobs import JobResult, is_open_mpi, job_environment, mpiexec

_UNSHARE = (
    *("unshare", "--net", "--uts", "--ipc", "--mount"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
# The first process of a host. MPI libraries look for network cards in /sys, so it has
# to show the host's own. Temporary files are each host's own too: launchers put process
# numbers into their names, and these are no longer unique over the hosts. Ignoring
# CHLD, which exec keeps, makes the kernel reap the host's orphans.
_HOST_SCRIPT = """set -e
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$2/tmp"
mount --bind "$2/hosts" /etc/hosts
ip link set lo up
echo ready
trap "" CHLD
exec cat >/dev/null
"""
_PROBE_SCRIPT = """set -e
hostname probe
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
ip link add name probe-switch type bridge
ip link add name probe-a type veth peer name probe-b
tc qdisc add dev probe-a root tbf rate 1gbit burst 128kb latency 50ms
"""
_SETUP_S = 20.0
_serial = itertools.count()


@functools.cache
def why_no_hosts() -> str | None:
    """Return why this machine cannot make virtual hosts, or None where it can."""
    if not sys.platform.startswith("linux"):
        return "virtual hosts need Linux"
    if os.geteuid() != 0:
        return "virtual hosts need root (or: unshare --user --map-root-user pytest ...)"
    missing = [
        tool
        for tool in ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
        if shutil.which(tool) is None
    ]
    if missing:
        return f"virtual hosts need {', '.join(missing)} (iproute2, util-linux)"
    probe = subprocess.run(
        [*_UNSHARE, "sh", "-c", _PROBE_SCRIPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SETUP_S,
        check=False,
    )
    if probe.returncode != 0:
        return f"virtual hosts are not permitted here: {probe.stderr.strip()}"
    return None


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a host's network card has sent and received, headers included."""

    sent: int
    received: int


class _Namespace:
    """One host (or the switch): its namespaces and the process that keeps them."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        self.name = name
        self._keeper = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _HOST_SCRIPT, "sh", name, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        readable, _, _ = select.select([self._keeper.stdout], [], [], _SETUP_S)
        said = self._keeper.stdout.readline() if readable else b"(nothing)"
        if said != b"ready\n":
            self.close()
            raise RuntimeError(f"host {name} did not start: {said.decode().strip()}")
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")
        # Whatever uses this network gets killed after a job.
        assert self._network != os.readlink("/proc/self/ns/net")

    @property
    def pid(self) -> int:
        """The keeper; it is in all of the host's namespaces but that of processes."""
        return self._keeper.pid

    def enter(self) -> list[str]:
        """Return the command prefix that runs a command on this host."""
        # The keeper's child is process 1 in there; its number out here is not known.
        return [
            *("nsenter", "--target", str(self.pid)),
            *("--net", "--uts", "--ipc", "--mount"),
            f"--pid=/proc/{self.pid}/ns/pid_for_children",
        ]

    def enter_network(self) -> list[str]:
        """Return the prefix for a command that must see the machine's processes."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts"]

    def network_command(self, *command: str) -> None:
        """Run ``ip`` or ``tc`` on this host's network."""
        done = subprocess.run(
            [*self.enter_network(), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SETUP_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")

    def link_bytes(self) -> LinkBytes:
        table = pathlib.Path(f"/proc/{self.pid}/net/dev").read_text()
        return _parse_link_bytes(table)

    def processes(self) -> list[int]:
        """Return the ids, as seen from outside, of what uses this host's network."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            # A process may end while it is looked at.
            with contextlib.suppress(OSError, StopIteration):
                if os.readlink(entry / "ns/net") != self._network:
                    continue
                status = (entry / "status").read_text().splitlines()
                state = next(line for line in status if line.startswith("State:"))
                numbers = next(line for line in status if line.startswith("NSpid:"))
                keeps_host = int(entry.name) == self.pid or numbers.split()[-1] == "1"
                if not keeps_host and state.split()[1] not in "ZX":
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End the host with all that runs on it; returns when it is gone."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # its child, the host's process 1, goes with it
            self._keeper.wait()
        self._keeper.stdout.close()


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

            def start(name: str) -> _Namespace:
                namespace = _Namespace(name, self.directory)
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
            AssertionError: it did not end within ``timeout_s``; the text holds what it
                printed. Nothing of it runs any more.
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
        late = False
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            self.end_processes()
            if process.poll() is None:
                process.kill()
            # Returns what was read before as well.
            stdout, stderr = process.communicate(timeout=10)
        if late:
            raise AssertionError(
                f"{shlex.join(command)} did not end within {timeout_s} s\n"
                f"{stdout}\n--- stderr\n{stderr}"
            )
        seconds = time.monotonic() - start
        return JobResult(process.returncode, stdout, stderr, seconds)

    def close(self) -> None:
        """Remove the hosts, the switch, the cables and the files."""
        self._stack.close()


def _make_switch(switch: _Namespace) -> None:
    # The name eth0 lets one -iface option serve the launcher and the hosts.
    run = switch.network_command
    run("ip", "link", "add", "name", "eth0", "type", "bridge")
    run("ip", "address", "add", "10.77.0.1/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")


def _plug_in(
    switch: _Namespace, port: str, host: _Namespace, address: str, rate: str | None
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
        AssertionError: the job did not end within ``timeout_s``.
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


def _parse_link_bytes(table: str) -> LinkBytes:
    """Read eth0's counters from the text of ``/proc/net/dev``."""
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return LinkBytes(sent=int(fields[8]), received=int(fields[0]))
    raise ValueError(f"no eth0 in {table!r}")
