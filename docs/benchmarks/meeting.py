"""Faults of ranks that torch.distributed joins, each tried several times.

    python docs/benchmarks/meeting.py [--times 10] [--only WORD] [--out FILE.json]

A row tells how often a promise was broken. Exit status 1 if any was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

TRAIN = ("--solver", "ddg", "--set", "data.limit=512", "--set", "train.threads=1", "--epochs")
LONG = "2000"
SECOND_FIT = """
import torch
from hybrid import Trainer, data, models, split
from hybrid.solvers import Backprop
train, test = data.load("digits")
for seed in range(2):
    torch.manual_seed(seed)
    network = models.resnet(depth=8, classes=10, channels=1)
    blocks = split(network, blocks=2, balance="even")
    Trainer(blocks, solver=Backprop()).fit(train, test, epochs=1)
print("trained twice")
"""
LATE = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(3)
sys.argv = ["hybrid", *sys.argv[1:]]
from hybrid.__main__ import main
main()
"""


_OF_TORCHRUN = re.compile(
    r"Traceback [^\n]*\n  File \"[^\n]*/torchrun\",.*?\n(?=torch\.)", re.DOTALL
)


class Ended(NamedTuple):
    """A job that has ended."""

    status: int
    seconds: float
    text: str

    def problems(self, status: int | tuple[int, ...], lines: int, most_seconds: float) -> list[str]:
        """What it did other than end so, with so many lines of ours, within so many seconds."""
        problems = []
        allowed = status if isinstance(status, tuple) else (status,)
        if self.status not in allowed:
            problems.append(f"status {self.status}, not {status}")
        said = re.findall(r"^hybrid: error: .*$", self.text, re.MULTILINE)
        if len(said) != lines:
            problems.append(f"{len(said)} lines of error, not {lines}: {said}")
        if self.seconds > most_seconds:
            problems.append(f"{self.seconds:.1f} s, more than {most_seconds:g}")
        for sign in ("Traceback", "terminate called", "SIGABRT", "Exception raised from", "(-6)"):
            if sign in self.text:
                problems.append(f"{sign!r} in what it printed")
        return problems


class Job:
    """Processes that one launcher, or a test, has started."""

    def __init__(self, stack: ExitStack, command: list[str], **variables: str) -> None:
        self._file = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"} | variables,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(self._kill)
        self.begun = monotonic()

    def rank(self, number: int) -> int:
        """The process of a rank, once it is there."""
        limit = monotonic() + 30
        while monotonic() < limit:
            for child in children(self.process.pid):
                with suppress(OSError):
                    variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                    if f"RANK={number}".encode() in variables:
                        return child
            sleep(0.02)
        raise TimeoutError(f"no rank {number}")

    def end(self, seconds: float = 90) -> Ended:
        """Wait for it; the time is from `begun`."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            status = 124
        return Ended(status, monotonic() - self.begun, self.printed())

    def printed(self) -> str:
        """What it has printed so far, but for torchrun's own report."""
        self._file.seek(0)
        lines = self._file.read().splitlines()
        text = "\n".join(line for line in lines if not re.match(r"[WE]\d{4} ", line))
        return _OF_TORCHRUN.sub("", text)

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    with suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Attack:
    """One try of a fault, in a folder of its own."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])

    def torchrun(self, *words: str, agent: tuple[str, ...] = ()) -> Job:
        """Two ranks of a module or script."""
        torchrun = str(Path(sys.executable).parent / "torchrun")
        ranks = ("--nproc-per-node=2", f"--master-port={self.port}")
        return Job(self.stack, [torchrun, *ranks, *agent, *words])

    def train(self, epochs: str = LONG, *words: str, agent: tuple[str, ...] = ()) -> Job:
        """A training by torchrun."""
        out = ("--out", str(self.folder / "run"))
        return self.torchrun("-m", "hybrid", "train", *TRAIN, epochs, *words, *out, agent=agent)

    def by_hand(self, rank: int, size: int, *words: str) -> Job:
        """A rank without a launcher, one epoch."""
        out = ("--out", str(self.folder / f"run{rank}"))
        command = [sys.executable, "-m", "hybrid", "train", *TRAIN, "1", *words, *out]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        return Job(self.stack, command, **place, RANK=str(rank), WORLD_SIZE=str(size))

    def trains(self, job: Job) -> Job:
        """Wait for a training's first checkpoint."""
        limit = monotonic() + 60
        while not any(self.folder.glob("run/checkpoints/0*[1-9]*/manifest.json")):
            if monotonic() > limit or job.process.poll() is not None:
                raise TimeoutError(f"no checkpoint: {job.printed()}")
            sleep(0.05)
        job.begun = monotonic()
        return job

    def script(self, text: str) -> str:
        """A file of that text."""
        file = self.folder / "script.py"
        file.write_text(text)
        return str(file)


def two_torchruns(attack: Attack) -> list[str]:
    """Two torchruns at one port: one of them cannot, and the other trains on."""
    jobs = [attack.train("2"), attack.train("2")]
    ends = sorted((job.end() for job in jobs), key=lambda end: end.status)
    statuses = [end.status for end in ends]
    return [] if statuses[1] else [f"statuses {statuses}"]


def stopped(attack: Attack) -> list[str]:
    """A signal ends a training with 75, and nothing else."""
    job = attack.trains(attack.train())
    ranks = [job.rank(0), job.rank(1)]
    for rank in ranks:
        os.kill(rank, signal.SIGUSR1)
    ended = job.end()
    problems = ended.problems(1, 0, 30)  # torchrun's own status
    statuses = re.findall(r"exitcode *: (-?\d+)", ended.text)
    return problems + [f"exit codes {statuses}"] * (set(statuses) != {"75"})


def diverged(attack: Attack) -> list[str]:
    """A training that diverges says so once."""
    wild = ("--lr", "1e12", "--set", "checkpoint.rollbacks=0")
    ended = attack.train("50", *wild).end()
    return ended.problems(1, 1, 30) + ["no reason"] * ("not finite" not in ended.text)


def second_fit(attack: Attack) -> list[str]:
    """A script trains twice."""
    ended = attack.torchrun(attack.script(SECOND_FIT)).end()
    return ended.problems(0, 0, 60) + ["one fit"] * (ended.text.count("trained twice") != 2)


def many_end(attack: Attack) -> list[str]:
    """Eight ranks end together after a training."""
    return (
        attack.train("1", "--replicas", "2", agent=("--nproc-per-node=8",)).end().problems(0, 0, 80)
    )


def restarted(attack: Attack) -> list[str]:
    """torchrun starts killed ranks again, which go on from the newest checkpoint."""
    job = attack.train("40", "--auto-resume", agent=("--max-restarts=2",))
    attack.trains(job)
    os.kill(job.rank(1), signal.SIGKILL)
    ended = job.end()
    problems = ended.problems(0, 1, 60)
    return problems + ["not resumed"] * ("resumed after step" not in ended.text)


def lost_first(attack: Attack) -> list[str]:
    """Rank 0 is killed."""
    job = attack.trains(attack.train())
    os.kill(job.rank(0), signal.SIGKILL)
    ended = job.end()
    return ended.problems(1, 1, 15) + ["no remedy"] * ("--resume" not in ended.text)


def lost_in_sum(attack: Attack) -> list[str]:
    """A replica is killed, while the other sums gradients by the engine."""
    job = attack.trains(attack.train(LONG, "--replicas", "2", "--set", "sync.order=engine"))
    os.kill(job.rank(1), signal.SIGKILL)
    ended = job.end()
    return ended.problems(1, 1, 15) + ["no remedy"] * ("--resume" not in ended.text)


def lost_while_starting(attack: Attack) -> list[str]:
    """A rank ends before it has met the other."""
    ended = attack.torchrun(attack.script(LATE), "train", *TRAIN, "1").end()
    return ended.problems(1, 0, 14)


def killed_while_starting(attack: Attack) -> list[str]:
    """A rank is killed two seconds after its start, wherever it is then."""
    job = attack.train()
    rank = job.rank(1)
    sleep(2)
    job.begun = monotonic()
    with suppress(ProcessLookupError):
        os.kill(rank, signal.SIGKILL)
    ended = job.end()
    lines = ended.text.count("hybrid: error: ")
    return ended.problems(1, min(lines, 1), 10)


def interrupted(attack: Attack) -> list[str]:
    """Ctrl-C reaches torchrun and all ranks, and is answered once."""
    job = attack.trains(attack.train())
    os.killpg(job.process.pid, signal.SIGINT)
    ended = job.end()
    said = ended.text.count("interrupted")
    return ended.problems((1, 130, -2), 1, 35) + [f"said {said} times"] * (said != 1)


def too_few(attack: Attack) -> list[str]:
    """WORLD_SIZE is too large: every rank names who is missing within 30 s."""
    jobs = [attack.by_hand(rank, 3) for rank in range(2)]
    sleep(max(0.0, jobs[0].begun + 30 - monotonic()))
    return [
        f"said {job.printed()!r}" for job in jobs if "rank 2 did not come to" not in job.printed()
    ]


def busy_port(attack: Attack) -> list[str]:
    """Another program has the port."""
    with socket.create_server(("127.0.0.1", int(attack.port))):
        ends = [job.end() for job in [attack.by_hand(rank, 2) for rank in range(2)]]
    return [problem for end in ends for problem in end.problems(1, 1, 30)]


ATTACKS: tuple[Callable[[Attack], list[str]], ...] = (
    two_torchruns,
    stopped,
    diverged,
    second_fit,
    many_end,
    restarted,
    lost_first,
    lost_in_sum,
    lost_while_starting,
    killed_while_starting,
    interrupted,
    too_few,
    busy_port,
)


def tried(attack: Callable[[Attack], list[str]]) -> list[str]:
    """What an attack broke, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="hybrid-meeting-") as folder, ExitStack() as stack:
        try:
            return attack(Attack(stack, Path(folder)))
        except TimeoutError as error:
            return [str(error)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python docs/benchmarks/meeting.py")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = {}
    for attack in ATTACKS:
        if options.only not in attack.__name__:
            continue
        broken = [problems for _ in range(options.times) if (problems := tried(attack))]
        about = (attack.__doc__ or "").strip()
        rows[attack.__name__] = {"about": about, "times": options.times, "broken": broken}
        print(f"{attack.__name__}: {len(broken)} of {options.times} broken. {about}", flush=True)
        for problems in broken:
            print("    " + "; ".join(problems), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["broken"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
