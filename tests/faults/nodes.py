"""Nodes of `torchrun --nnodes 1:N` that are lost and that join, and what the run does meanwhile.

    python -m tests.faults.nodes [--changes 20] [--nodes 3] [--seed 0] [--apart] [--shared]
        [--out FILE]

A node is an agent of torchrun on a port of this host, with one rank and, if they are `--apart`, a
disk of its own: a folder that is mounted where the others have theirs. It is lost by kill -9 of its
whole process group, or joins. After every change the run has to make steps again within LIMIT
seconds. In the end it trains on to the end of an epoch, from whatever disk has its newest
checkpoint. Its metrics are then those of one run, with every mini-batch once and in order, and its
weights have the bits of an undisturbed run's on one rank, since it trains by exact gradients. Exit
status 1 if not.

An agent that joins needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with it the first rank of every
start has a store. Without it (--shared) the first agent keeps one store for all starts, and torch
2.13 lets an agent that joins wait there for an address for ever: such jobs lose nodes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

from hybrid.folder import checkpoint
from tests.faults.processes import descendants, send
from tests.support.ranks.world import for_mpirun

LIMIT = 120.0
"""Seconds from a change to the next steps; a meeting that fails takes 300."""
BATCH = 64
RUN = (
    *("train", "--model", "resnet8", "--data", "digits", "--solver", "backprop"),
    *("--batch-size", str(BATCH), "--set", "train.threads=1", "--set", "schedule.name=constant"),
    *("--set", "schedule.warmup_epochs=0", "--set", "train.evaluate_every=1000000"),
)
WORDS = (
    *(*RUN, "--epochs", "100000", "--auto-resume", "--set", "checkpoint.minutes=0.02"),
    *("--set", "links.timeout=60", "--set", "checkpoint.every=1000000"),
)
MEETING = "last_call_timeout=2,timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Agents that notice within 3 s, instead of 15, that one is lost."""


@dataclass
class Change:
    """A node that was lost or has joined."""

    what: str
    nodes: int
    """That are there afterwards."""
    seconds: float | None
    """To the next steps; None: the run stood still."""
    repeated: int
    """Steps that were made again, since they are newer than the checkpoint."""


class Nodes:
    """The agents of one job, by number."""

    def __init__(self, most: int, root: Path, shared: bool, apart: bool) -> None:
        self.root, self.out, self.apart = root, root / "runs" / "run", apart
        self.disks = [root / f"disk-{n}" if apart else root / "runs" for n in range(most)]
        self.environment = for_mpirun() | {"CI": "1"}
        if not shared:
            self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = port = free.getsockname()[1]
        torchrun = Path(sys.executable).with_name("torchrun")
        self.command = [
            *(str(torchrun), "--nnodes", f"1:{most}", "--nproc-per-node", "1"),
            *("--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.2"),
            *("--rdzv-conf", MEETING),
            *("-m", "hybrid", *WORDS, "--out", str(self.out)),
        ]

    def join(self, number: int) -> None:
        for folder in (self.disks[number], self.out.parent):
            folder.mkdir(exist_ok=True)
        command = self.command
        if self.apart:
            mount = f'mount --bind {self.disks[number]} {self.out.parent} && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mount, "_", *command]
        with (self.root / f"node-{number}.log").open("a") as log:
            self.agents[number] = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while number == 0:  # the first one serves the others' meeting
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            sleep(0.1)

    def lose(self, number: int) -> None:
        agent = self.agents.pop(number)
        for pid in [agent.pid, *descendants(agent.pid)]:
            send(pid, signal.SIGKILL)
        agent.wait()

    def run(self) -> Path:
        """The run folder that was started last."""
        runs = [disk / "run" for disk in self.disks]
        return max(runs, key=lambda run: _changed(run / "starts.jsonl"))

    def steps(self) -> int:
        """The steps that the metrics tell of."""
        with suppress(OSError):
            lines = (self.run() / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            return int(json.loads(whole[-1])["step"]) if whole else 0
        return 0

    def start(self) -> tuple[int, int]:
        """When the run was last started, in nanoseconds, and at which step; 0: not yet."""
        file = self.run() / "starts.jsonl"
        with suppress(OSError, ValueError, IndexError):
            return _changed(file), int(json.loads(file.read_text().splitlines()[-1])["step"])
        return 0, 0


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def job(count: int, nodes: Nodes, random: Random, shared: bool) -> list[Change]:
    """Up to `count` changes of a run."""
    done, most = list[Change](), len(nodes.disks)

    def changed(what: str, start: tuple[int, int]) -> bool:
        step = nodes.steps()
        seconds = _await_steps(nodes, start)
        repeated = max(0, step - nodes.start()[1])
        done.append(Change(what, len(nodes.agents), seconds, repeated))
        print(done[-1], flush=True)
        return done[-1].seconds is not None

    try:
        for number in range(most):
            nodes.join(number)
        goes_on = changed("all start", (0, 0))
        while goes_on and len(done) <= count:
            sleep(random.uniform(0, 4))
            there, start = sorted(nodes.agents), nodes.start()
            may_go = [n for n in there if n]  # the first one has the agents' meeting
            absent = [n for n in range(most) if n not in there and not shared]
            if may_go and (not absent or random.random() < 0.5):
                number = random.choice(may_go)
                nodes.lose(number)
                goes_on = changed(f"node {number} is lost", start)
            elif absent:
                number = random.choice(absent)
                nodes.join(number)
                goes_on = changed(f"node {number} joins", start)
            else:
                break
    finally:
        for number in list(nodes.agents):
            nodes.lose(number)
    return done


def _await_steps(nodes: Nodes, start: tuple[int, int]) -> float | None:
    """Seconds until a run that has started anew has made steps; None after LIMIT."""
    begin, before = monotonic(), None
    while monotonic() - begin < LIMIT:
        if before is None and nodes.start() != start:
            before = nodes.steps()
        if before is not None and nodes.steps() > before:
            return round(monotonic() - begin, 2)
        sleep(0.05)
    return None


def _faults(nodes: Nodes) -> list[str]:
    """What is wrong with a run that was often restarted, once it has trained on to an epoch's end.

    Its first disk, the newest one, goes on without the others.
    """
    run, alone = nodes.run(), nodes.root / "undisturbed"
    stored = _manifest(run)
    epochs = str(stored["step"] // stored["steps_per_epoch"] + 1)
    for words in (["--resume", "--out", run], [*RUN[1:], "--out", alone]):
        command = [sys.executable, "-m", "hybrid", "train", *map(str, words), "--epochs", epochs]
        subprocess.run([*command, "--blocks", "1"], check=True, stdout=subprocess.DEVNULL)
    steps, faults = 0, []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        if found["phase"] in ("serial", "parallel"):
            if found["step"] * BATCH != steps * BATCH + found["samples"]:
                faults.append(f"step {found['step']}, of {found['samples']} samples, after {steps}")
            steps = found["step"]
    same = _manifest(run)["units"] == _manifest(alone)["units"]
    return faults + ["other bits than an undisturbed run's"] * (not same)


def _manifest(run: Path) -> dict[str, Any]:
    return checkpoint.read_manifest(checkpoint.complete(run / "checkpoints")[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.faults.__main__ import facts

    parser = argparse.ArgumentParser(prog="python -m tests.faults.nodes")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--apart", action="store_true", help="a disk for each node")
    parser.add_argument("--shared", action="store_true", help="one store for all starts")
    options = parser.parse_args(arguments)
    random, done, faults = Random(options.seed), list[Change](), list[str]()
    while sum(change.what != "all start" for change in done) < options.changes:
        with tempfile.TemporaryDirectory(prefix="hybrid-nodes-") as root:
            left = options.changes - sum(change.what != "all start" for change in done)
            nodes = Nodes(options.nodes, Path(root), options.shared, options.apart)
            done += job(left, nodes, random, options.shared)
            faults += _faults(nodes)
        if done[-1].seconds is None:
            break
    body: dict[str, Any] = facts("python -m tests.faults.nodes " + " ".join(sys.argv[1:]))
    body |= {"changes": [asdict(change) for change in done], "faults": faults}
    if options.out is not None:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(*(faults or ["every mini-batch once, and the bits of an undisturbed run"]), sep="\n")
    return int(bool(faults) or any(change.seconds is None for change in done))


if __name__ == "__main__":
    sys.exit(main())
