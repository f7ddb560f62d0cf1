"""Where ranks find each other that torchrun has started, or what else sets its variables."""

from __future__ import annotations

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
from hybrid.links.gloo import LOOPBACK, TorchCommunicator, local_store, stay_local
from hybrid.ranks import stopping

MEETING_SECONDS = 300.0
"""Within which all ranks must have started: their imports may take minutes on a busy disk."""
PATIENCE_SECONDS = 15.0
"""After which the ranks that are missing are named."""
CONNECT_SECONDS = 20.0
"""Within which a rank reaches the store of the meeting, or says that it cannot."""
LOCAL = ("localhost", LOOPBACK)
"""Addresses of a meeting of one host."""
_LAUNCHERS = "use torchrun, mpirun or srun --mpi=pmix"


class MeetingError(ValueError):
    """Ranks that do not find each other, and cannot agree on who says so."""

    def __init__(self, text: str, speaks: bool) -> None:
        super().__init__(text)
        self.speaks = speaks or not _has_launcher()
        """Whether this rank prints it: without a launcher each has a terminal of its own."""

    def end_process(self) -> None:
        """Print it and end the process, from a thread beside one that waits inside torch."""
        if self.speaks:
            tell(f"hybrid: error: {self}")
        os._exit(1)


def of_torchrun(rank: int, size: int) -> TorchCommunicator:
    """The ranks of torchrun, or of any launcher that sets MASTER_ADDR and MASTER_PORT.

    MeetingError if they do not meet there.
    """
    from torch.distributed import is_initialized

    if is_initialized():  # by the script itself
        return TorchCommunicator()
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (host and port.isdecimal()):
        raise MeetingError(
            f"{size} ranks were started, but MASTER_ADDR={host} and MASTER_PORT={port} are no "
            f"address and port where they meet: set both, or {_LAUNCHERS}",
            rank == 0,
        )
    if host in LOCAL or os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        stay_local()
    # torchrun's own process may have the store, and keeps it for the ranks that it restarts
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _met(host, int(port), kept, rank, size)


def _met(host: str, port: int, kept: bool, rank: int, size: int) -> TorchCommunicator:
    import torch.distributed

    c10d: Any = torch.distributed
    where, limit = f"{host}:{port}", timedelta(seconds=CONNECT_SECONDS)
    serves = rank == 0 and not kept

    def unreachable(cause: str) -> MeetingError:
        problem = f"reach rank 0 at {where} within {CONNECT_SECONDS:g} s ({cause}): it has not"
        problem += " started, or another program has that port"
        if serves:
            problem = f"listen at {where} ({cause}): another program has that port"
        remedy = f"choose another MASTER_PORT, or {_LAUNCHERS}"
        return MeetingError(f"rank {rank} of {size} cannot {problem}; {remedy}", rank == 0)

    try:
        # torch waits for ever for a program at that port that is silent
        with stopping.after(CONNECT_SECONDS + 2, unreachable("no answer").end_process):
            if serves and host in LOCAL:
                shared = local_store(port)
            else:
                shared = c10d.TCPStore(host, port, None, serves, limit, wait_for_workers=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise unreachable(_cause(error)) from None
    try:
        store = c10d.PrefixStore(f"hybrid {identity()}", shared)  # of this job, and no other
        meeting = _meet(store, where, rank, size, kept)
        store = c10d.PrefixStore(meeting, store)
        return TorchCommunicator(store, rank, size)
    except RuntimeError as error:
        raise MeetingError(
            f"rank {rank} of {size} has lost the others at {where} while they met "
            f"({_cause(error)}): see why one of them has ended, and start again",
            rank == 0,
        ) from None


def _meet(store: Any, where: str, rank: int, size: int, kept: bool = False) -> str:
    """Wait until all ranks have met, in looks between which a signal is heard; the meeting's name.

        rank r    shows who it is (a new name at every start)
        rank 0    calls a meeting of those that are shown, and another when one of them changes
        rank r    takes part in a meeting that it is called to

    A store that is `kept` has the ranks of earlier starts, whose processes have ended: they take
    part in nothing. Ranks need not agree on how often they have been started.
    """
    name = f"{uuid4().hex}, process {os.getpid()} on {socket.gethostname()}"
    names = [f"rank {r}" for r in range(size)]
    store.set(names[rank], name)
    begin, told, called = monotonic(), False, list[str]()
    while True:
        stopping.leave_alone(rank)
        missing = [r for r in range(size) if not store.check([names[r]])]
        if rank == 0 and not missing:
            shown = [store.get(each).decode() for each in names]
            if shown != called:
                called = shown
                store.set("meeting", json.dumps([uuid4().hex, called]))
        other = store.get(names[rank]).decode()
        if store.check(["meeting"]):
            meeting, ranks = json.loads(store.get("meeting"))
            invited = ranks[rank] == name
            if invited:
                store.set(f"{meeting} {rank}", "")
            absent = [r for r in range(size) if not store.check([f"{meeting} {r}"])]
            if invited and not absent:
                return str(meeting)
            if not (absent or kept):  # they have begun
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
        if missing and waited > (MEETING_SECONDS if told else PATIENCE_SECONDS):
            speaks = rank == next((r for r in range(size) if r not in missing), rank)
            listed = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            text = f"of {size} announced ranks, rank {listed} did not come to {where}"
            if told:
                raise MeetingError(
                    f"{text} within {MEETING_SECONDS:g} s: start as many, with the same words in "
                    "the same folder, or unset the launcher's variables",
                    speaks,
                )
            if speaks or not _has_launcher():
                tell(f"hybrid: {text} yet; rank {rank} waits for {MEETING_SECONDS:g} s")
            told = True
        sleep(min(0.1, 0.002 + waited / 10))


def _cause(error: Exception) -> str:
    """The system's reason in an error of torch's, without its frames."""
    text = (isinstance(error, OSError) and error.strerror) or one_line(error)
    return text.partition(" Exception raised")[0][:200]


def _has_launcher() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ


def identity() -> str:
    """What all ranks of a job have in common, and another job has not: a hash.

    It is of the launcher's names for the job and of the command, which has settings, seed and
    folder.
    """
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "WORLD_SIZE")
    facts = [*(os.environ.get(name, "") for name in names), os.getcwd(), *sys.argv[1:]]
    return hashlib.sha256("\0".join(facts).encode(errors="replace")).hexdigest()[:16]
