"""Nodes of `torchrun --nnodes 1:N` that are lost and that join, and what the run does meanwhile.

    python -m tests.faults.nodes [--changes 20] [--nodes 3] [--seed 0] [--shared] [--out FILE]

A node is an agent of torchrun on a port of this host, with one rank. It is lost by kill -9 of its
whole process group, or joins. After every change the run has to make steps again within LIMIT
seconds. In the end its metrics are those of one run: every step is there, once, in order. Exit
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
from itertools import pairwise
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

from tests.faults.processes import descendants, send
from tests.support.ranks.world import for_mpirun

LIMIT = 120.0
"""Seconds from a change to the next steps; a meeting that fails takes 300."""
WORDS = (
    *("train", "--model", "resnet8", "--data", "digits", "--epochs", "100000", "--auto-resume"),
    *("--set", "train.threads=1", "--set", "checkpoint.minutes=0.02", "--set", "links.timeout=60"),
    *("--set", "checkpoint.every=1000000", "--set", "train.evaluate_every=1000000"),
)


@dataclass
class Change:
    """A node that was lost or has joined."""

    what: str
    nodes: int
    """That are there afterwards."""
    seconds: float | None
    """To the next steps; None: the run stood still."""


class Nodes:
    """The agents of one job, by number."""

    def __init__(self, most: int, root: Path, shared: bool) -> None:
        self.root, self.out = root, root / "run"
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
            *("--rdzv-conf", "last_call_timeout=2,timeout=120"),
            *("-m", "hybrid", *WORDS, "--out", str(self.out)),
        ]

    def join(self, number: int) -> None:
        with (self.root / f"node-{number}.log").open("a") as log:
            self.agents[number] = subprocess.Popen(
                self.command,
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

    def steps(self) -> int:
        """The steps that the metrics tell of."""
        with suppress(OSError):
            lines = (self.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            return int(json.loads(whole[-1])["step"]) if whole else 0
        return 0

    def start(self) -> int:
        """When the run was last started, in nanoseconds; 0: not yet."""
        file = self.out / "starts.jsonl"
        return file.stat().st_mtime_ns if file.exists() else 0


def job(count: int, most: int, random: Random, root: Path, shared: bool) -> list[Change]:
    """Up to so many changes of a run on up to `most` nodes."""
    nodes, done = Nodes(most, root, shared), list[Change]()

    def changed(what: str, start: int) -> bool:
        done.append(Change(what, len(nodes.agents), _await_steps(nodes, start)))
        print(done[-1], flush=True)
        return done[-1].seconds is not None

    try:
        for number in range(most):
            nodes.join(number)
        goes_on = changed("all start", 0)
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


def _await_steps(nodes: Nodes, start: int) -> float | None:
    """Seconds until a run that has started anew has made steps; None after LIMIT."""
    begin, before = monotonic(), None
    while monotonic() - begin < LIMIT:
        if before is None and nodes.start() != start:
            before = nodes.steps()
        if before is not None and nodes.steps() > before:
            return round(monotonic() - begin, 2)
        sleep(0.05)
    return None


def _fault(out: Path) -> str:
    """What is wrong with the metrics of a run that was often restarted."""
    steps = []
    for line in (out / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and (found := json.loads(line))["phase"] != "test":
            steps.append((found["step"], found["samples"]))
    wrong = [(a, b) for a, b in pairwise(steps) if b[0] <= a[0]]
    return f"steps {wrong[0]} follow each other" if wrong else ""


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.faults.__main__ import facts

    parser = argparse.ArgumentParser(prog="python -m tests.faults.nodes")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--shared", action="store_true", help="one store for all starts")
    options = parser.parse_args(arguments)
    random, done, faults = Random(options.seed), list[Change](), list[str]()
    while sum(change.what != "all start" for change in done) < options.changes:
        with tempfile.TemporaryDirectory(prefix="hybrid-nodes-") as root:
            left = options.changes - sum(change.what != "all start" for change in done)
            done += job(left, options.nodes, random, Path(root), options.shared)
            faults += filter(None, [_fault(Path(root, "run"))])
        if done[-1].seconds is None:
            break
    body: dict[str, Any] = facts("python -m tests.faults.nodes " + " ".join(sys.argv[1:]))
    body |= {"changes": [asdict(change) for change in done], "faults": faults}
    if options.out is not None:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(*(faults or ["every step is there once"]), sep="\n")
    return int(bool(faults) or any(change.seconds is None for change in done))


if __name__ == "__main__":
    sys.exit(main())
