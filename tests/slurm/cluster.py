"""A real Slurm of four nodes on this machine: Debian's daemons on loopback ports.

Everything lives in one folder and in a network of its own, so clusters know neither of each other
nor of what happens to the machine's network; the daemons die with the process that started them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv", "ip", "unshare", "nsenter")
GPUS = ("/dev/null", "/dev/zero")
"""What Slurm takes for the GPUs of a node: it hands out their numbers."""
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
TmpFS={folder}/tmp.%n
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
NETWORK = """\
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 10.98.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
echo up
exec sleep infinity
"""
"""One card: where there is none, getaddrinfo knows not even 127.0.0.1."""


class Slurm:
    """The cluster, from its making to `stop`; its commands run with its own SLURM_CONF."""

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 2) -> None:
        self.folder, self.names = folder, [f"n{number + 1}" for number in range(nodes)]
        self.configuration = folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(self.configuration)}
        self._network: subprocess.Popen[str] | None = None
        for name in ("state", *(f"tmp.{name}" for name in self.names)):  # PMIx wants its own
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)  # munged trusts no folder that others may write to
        ports, host = _free_ports(nodes + 1), socket.gethostname().partition(".")[0]
        described = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={cpus} RealMemory=1000 Gres=gpu:{len(GPUS)}"
            for name, port in zip(self.names, ports[1:], strict=True)
        )
        text = CONFIGURATION.format(host=host, folder=folder, ports=ports, nodes=described)
        self.configuration.write_text(text)
        devices = "".join(f"Name=gpu File={device}\n" for device in GPUS)
        (folder / "gres.conf").write_text(devices)

    def start(self) -> None:
        """Start the daemons; RuntimeError, with what they said, unless every node is idle soon."""
        self._network = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-ec", NETWORK],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._network.stdout is not None
        if self._network.stdout.readline() != "up\n":
            raise RuntimeError("no network namespace can be made here")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{file}" for name, file in files.items()]
        self._daemon("munged", "--foreground", "--force", *options, "--log-file=/dev/stderr")
        self._until("munge answers", (self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-i")
        self._until("slurmctld answers", lambda: "UP" in self("scontrol", "ping", fails=True))
        for name in self.names:
            self._daemon("slurmd", "-D", "-N", name, called=name)
        self.wait_until_idle()

    def stop(self) -> None:
        """End exactly the jobs and daemons of this cluster."""
        limit = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < limit:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        for daemon in self.daemons.values():
            daemon.wait(10)
        if self._network is not None:
            self._network.kill()
            self._network.wait(10)

    def processes(self) -> list[int]:
        """The ids of everything started by or for this cluster, known by its SLURM_CONF."""
        mark, found = f"SLURM_CONF={self.configuration}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return [process for process in found if process != os.getpid()]

    def named(self, program: str) -> list[int]:
        """The ids of the cluster's processes of this name."""
        return [process for process in self.processes() if _name(process) == program]

    @contextmanager
    def slow(self, node: str) -> Iterator[None]:
        """A node whose daemon does not answer."""
        daemon = self.daemons[node]
        daemon.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            daemon.send_signal(signal.SIGCONT)

    def kill(self, program: str) -> None:
        """SIGKILL to the last of the cluster's processes of this name."""
        os.kill(max(self.named(program)), signal.SIGKILL)

    def __call__(self, *command: object, fails: bool = False, seconds: float = 60) -> str:
        """Standard output of a command of Slurm's; `fails`: whatever its exit status."""
        done = subprocess.run(
            self._inside(*command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode and not fails:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout

    def wait_until_idle(self) -> None:
        """Wait until no job is left on any node."""
        words = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t")
        self._until(
            "all nodes are idle", lambda: self(*words).split() == ["idle"] * len(self.names)
        )

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` tells of a job, or of a task of an array."""
        said = self("scontrol", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def wait_for(self, number: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Wait until the job is in one of the states; a requeued one is held for 2 s, not 120.

        Nodes refuse a job that starts again in the second in which it ended.
        """

        shortened = set()

        def there() -> bool:
            found = self.job(number)
            held = found["JobState"] == "PENDING" and found["Reason"] == "BeginTime"
            if held and found["Restarts"] not in shortened:
                self("scontrol", "update", f"JobId={number}", "StartTime=now+2")
                shortened.add(found["Restarts"])
            return found["JobState"] in states

        try:
            self._until(f"job {number} is {' or '.join(states)}", there, seconds)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self._log(number)}") from None
        return self.job(number)

    def _inside(self, *command: object) -> list[str]:
        """The words that run a command in the cluster's network."""
        assert self._network is not None
        enter = ("nsenter", f"--net=/proc/{self._network.pid}/ns/net")
        return [str(word) for word in (*enter, *command)]

    def _daemon(self, *command: str, called: str = "") -> None:
        name = called or command[0]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                self._inside("setpriv", "--pdeathsig", "TERM", *command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def _until(self, what: str, reached: Callable[[], bool], seconds: float = 30) -> None:
        limit = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > limit:
                said = (self.folder / "slurmctld.log").read_text()[-3000:]
                raise RuntimeError(f"after {seconds} s not yet: {what}\n{said}")
            time.sleep(0.1)

    def _log(self, number: str) -> str:
        file = Path(self.job(number).get("StdOut", ""))
        return file.read_text(errors="replace")[-3000:] if file.is_file() else ""


def why_not() -> str:
    """Why there can be no cluster here; empty where there can. Installs Slurm where it may."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if _missing() and shutil.which("apt-get"):
        for words in ("update", f"install --yes --no-install-recommends {PACKAGES}"):
            subprocess.run(
                ["apt-get", "-qq", *words.split()],
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=150,
                check=False,
            )
    if left := _missing():
        return f"there is no {', '.join(left)}, and apt-get could not install it"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


PACKAGES = "slurm-wlm munge libpmix-dev iproute2"
"""The last for srun --mpi=pmix: Slurm's plug-in loads the libpmix.so of the development files."""


def _missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


def _free_ports(number: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""
