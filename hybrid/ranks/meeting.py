"""The rendezvous of ranks started by torchrun, or by any launcher that sets its variables."""

import hashlib
import json
import os
import socket
import sys
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from hybrid.errors import one_line, tell
from hybrid.links.gloo import LOOPBACK, TorchCommunicator, local_store, own_address, stay_local
from hybrid.ranks import stopping

MEETING_SECONDS = 300.0
"""The time for all ranks to start: their imports may take minutes on a busy disk."""
PATIENCE_SECONDS = 15.0
"""The wait after which missing ranks are named."""
CONNECT_SECONDS = 20.0
"""The time for a rank to reach the store of the meeting."""
LOCAL = ("localhost", LOOPBACK)
"""Master addresses of a job on one host."""
_LAUNCHERS = "use torchrun, mpirun or srun --mpi=pmix"


class MeetingError(ValueError):
    """Ranks do not find each other, so they cannot agree on which of them prints the error."""

    def __init__(self, text: str, speaks: bool) -> None:
        super().__init__(text)
        self.speaks = speaks or not _has_launcher()
        """Whether this rank prints the error; without a launcher each rank has its own terminal."""

    def end_process(self) -> None:
        """Print the error and end the process, while another thread waits inside torch."""
        if self.speaks:
            tell(f"hybrid: error: {self}")
        os._exit(1)


def of_torchrun(rank: int, size: int) -> TorchCommunicator:
    """Connect the ranks of torchrun, or of any launcher that sets MASTER_ADDR and MASTER_PORT.

    Raises MeetingError if they do not meet there.
    """
    from torch.distributed import is_initialized

    if is_initialized():  # by the script itself
        return TorchCommunicator()
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (host and port.isdecimal()):
        raise MeetingError(
            f"{size} ranks were started, but MASTER_ADDR={host} and MASTER_PORT={port} are not an "
            f"address and a port: set both, or {_LAUNCHERS}",
            rank == 0,
        )
    if host in LOCAL or os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        stay_local()
    # torchrun's agent may host the store, and keeps it for the ranks that it restarts
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _connect(host, int(port), agent_store, rank, size)


def _connect(host: str, port: int, agent_store: bool, rank: int, size: int) -> TorchCommunicator:
    import torch.distributed

    c10d: Any = torch.distributed
    where, limit = f"{host}:{port}", timedelta(seconds=CONNECT_SECONDS)
    serves = rank == 0 and not agent_store

    def unreachable(cause: str) -> MeetingError:
        problem = f"reach rank 0 at {where} within {CONNECT_SECONDS:g} s ({cause}): it has not"
        problem += " started, or another program has that port"
        if serves:
            problem = f"listen at {where} ({cause}): another program has that port"
        remedy = f"choose another MASTER_PORT, or {_LAUNCHERS}"
        return MeetingError(f"rank {rank} of {size} cannot {problem}; {remedy}", rank == 0)

    try:
        # torch waits forever if another program listens at that port and never answers
        with stopping.after(CONNECT_SECONDS + 2, unreachable("no answer").end_process):
            if serves and host in LOCAL:
                shared = local_store(port)
            else:
                shared = c10d.TCPStore(host, port, None, serves, limit, wait_for_workers=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise unreachable(_cause(error)) from None
    try:
        store = c10d.PrefixStore(f"hybrid {identity()}", shared)  # separate from other jobs
        meeting, names = _meet(store, where, rank, size, agent_store)
        if len({name.partition(" on ")[2] for name in names}) > 1:
            try:
                own_address()
            except ValueError as error:
                raise MeetingError(str(error), True) from None
        store = c10d.PrefixStore(meeting, store)
        return TorchCommunicator(store, rank, size)
    except RuntimeError as error:
        raise MeetingError(
            f"rank {rank} of {size} has lost the others at {where} while they met "
            f"({_cause(error)}): see why one of them has ended, and start again",
            rank == 0,
        ) from None


def _meet(
    store: Any, where: str, rank: int, size: int, agent_store: bool = False
) -> tuple[str, tuple[str, ...]]:
    """Poll the store until all ranks have met; return the meeting's name and the ranks' names.

        rank r    registers under a name that is new at every start
        rank 0    calls a meeting of the registered names, and another when one of them changes
        rank r    joins a meeting that lists its name

    Signals are handled between polls. An agent's store still has the names of earlier starts,
    whose processes have ended and join no meeting. Ranks may have been started a different number
    of times.
    """
    name = f"{uuid4().hex}, process {os.getpid()} on {socket.gethostname()}"
    keys = [f"rank {r}" for r in range(size)]
    store.set(keys[rank], name)
    begin, warned, invited_names = monotonic(), False, list[str]()
    while True:
        stopping.leave_unmet(rank)
        missing = [r for r in range(size) if not store.check([keys[r]])]
        if rank == 0 and not missing:
            names = [store.get(key).decode() for key in keys]
            if names != invited_names:
                invited_names = names
                store.set("meeting", json.dumps([uuid4().hex, names]))
        other = store.get(keys[rank]).decode()
        if store.check(["meeting"]):
            meeting, ranks = json.loads(store.get("meeting"))
            invited = ranks[rank] == name
            if invited:
                store.set(f"{meeting} {rank}", "")
            absent = [r for r in range(size) if not store.check([f"{meeting} {r}"])]
            if invited and not absent:
                return str(meeting), tuple(ranks)
            if not (absent or agent_store):  # the job has begun
                other = ranks[rank]
            missing = missing or (absent if invited else [0] * (rank > 0))
        if other != name:
            raise MeetingError(
                f"two processes are rank {rank} of {size} at {where}, {other.partition(', ')[2]} "
                f"and {name.partition(', ')[2]}: give every job a MASTER_PORT of its own, or use "
                "torchrun --standalone",
                True,
            )
        waited = monotonic() - begin
        if missing and waited > (MEETING_SECONDS if warned else PATIENCE_SECONDS):
            speaks = rank == next((r for r in range(size) if r not in missing), rank)
            listed = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            text = f"of {size} announced ranks, rank {listed} did not come to {where}"
            if warned:
                raise MeetingError(
                    f"{text} within {MEETING_SECONDS:g} s: start all ranks with the same command "
                    "in the same folder, or unset the launcher's variables",
                    speaks,
                )
            if speaks or not _has_launcher():
                tell(f"hybrid: {text} yet; rank {rank} waits for {MEETING_SECONDS:g} s")
            warned = True
        sleep(min(0.1, 0.002 + waited / 10))


def _cause(error: Exception) -> str:
    """Extract the system's reason from an error of torch, without the stack frames."""
    text = (isinstance(error, OSError) and error.strerror) or one_line(error)
    return text.partition(" Exception raised")[0][:200]


def _has_launcher() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ


def identity() -> str:
    """Hash the launcher's names of the job and the command: equal on the ranks of one job only.

    The command has settings, seed and folder.
    """
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "WORLD_SIZE")
    facts = [*(os.environ.get(name, "") for name in names), os.getcwd(), *sys.argv[1:]]
    return hashlib.sha256("\0".join(facts).encode(errors="replace")).hexdigest()[:16]
