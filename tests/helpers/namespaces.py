"""One virtual host: a set of Linux namespaces, and the process that keeps them.

A host has its own network, host name, ``/dev/shm``, System V memory and process
numbers, so that ranks on two hosts can reach each other over the network only.

No namespace has a name in ``/run/netns``. Each lives as long as a process that waits
for the end of a pipe, and the process that made the host holds the pipe's other end;
so the host goes when it is closed, and also when its maker is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import select
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

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


class Namespace:
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


def _parse_link_bytes(table: str) -> LinkBytes:
    """Read eth0's counters from the text of ``/proc/net/dev``."""
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return LinkBytes(sent=int(fields[8]), received=int(fields[0]))
    raise ValueError(f"no eth0 in {table!r}")
