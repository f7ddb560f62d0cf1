"""Two hosts on one machine: network namespaces with names of their own, joined by a link."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from world import for_mpirun

ADDRESSES = ("10.99.0.1", "10.99.0.2")


class TwoHosts:
    """The hosts, by name; the first is where mpirun starts.

    host 0 (mpirun, rank 0)   eth0 ---- link ---- eth0   host 1 (prted, rank 1)
    """

    def __init__(self, names: tuple[str, str], agent: Path) -> None:
        self.names, self._agent = names, agent

    def mpirun(self, *command: object, ranks_each: int = 1, **popen: Any) -> subprocess.Popen[str]:
        """Start an Open MPI job on both hosts, over TCP alone."""
        mpirun = Path(sys.executable).parent / "mpirun"
        place = ("--host", ",".join(ADDRESSES), "--map-by", f"ppr:{ranks_each}:node:oversubscribe")
        layers = {"pml": "ob1", "btl": "tcp,self,sm", "btl_tcp_if_include": "eth0"}
        tcp = [word for name, value in layers.items() for word in ("--mca", name, value)]
        near = ("--prtemca", "plm_ssh_agent", self._agent)
        # bound, the ranks of both hosts would share the machine's first cores
        place += ("--bind-to", "none")
        arguments = (mpirun, *near, *place, *tcp, *command)
        return subprocess.Popen(
            [str(part) for part in (*_on(self.names[0]), *arguments)],
            env=os.environ | for_mpirun() | popen.pop("env", {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )

    def cut(self, silently: bool) -> None:
        """Cut the link: take it down on both ends, or lose every packet without a word."""
        for name, peer in zip(self.names, reversed(ADDRESSES), strict=True):
            if silently:
                # addressed to a card that is not there, a frame is nobody's
                nobody = ("lladdr", "02:00:00:00:00:00", "nud", "permanent")
                _run("ip", "-n", name, "neigh", "replace", peer, *nobody, "dev", "eth0")
            else:
                _run("ip", "-n", name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """A link that works again."""
        for name in self.names:
            _run("ip", "-n", name, "neigh", "flush", "dev", "eth0", "nud", "permanent")
            _run("ip", "-n", name, "link", "set", "eth0", "up")

    def processes(self, host: int) -> dict[int, str]:
        """Number and command of every process of a host."""
        found = {}
        for pid in _run("ip", "netns", "pids", self.names[host]).split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(words):
                found[int(pid)] = b" ".join(words).decode().strip()
        return found

    def kill(self, host: int, word: str = "") -> None:
        """Kill the processes of a host with a word in their command, or all."""
        for pid, command in self.processes(host).items():
            if word in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts for the body; `missing()` says why there may be none."""
    mark = token_hex(3)
    names = (f"hosta-{mark}", f"hostb-{mark}")
    agent = folder / f"agent-{mark}"
    # in place of ssh: agent HOST COMMAND...
    agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(_on(names[1]))} sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = TwoHosts(names, agent)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = "eth0 netns {} type veth peer name eth0 netns {}".format(*names)
        _run("ip", "link", "add", *ends.split())
        for name, address in zip(names, ADDRESSES, strict=True):
            for words in (f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"):
                _run("ip", "-n", name, *words.split())
        yield hosts
    finally:
        for host, name in enumerate(names):
            if Path("/run/netns", name).exists():
                hosts.kill(host)
                _run("ip", "netns", "del", name)


def missing() -> str:
    """What keeps this machine from having two hosts; empty if nothing does."""
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "hostname")):
        return "two hosts need iproute2's ip, unshare and hostname"
    done = subprocess.run(["unshare", "-nu", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


def _on(name: str) -> list[str]:
    """The beginning of a command that runs on a host."""
    named = f'hostname {name} && exec "$0" "$@"'
    return ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", f"{named}"]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
