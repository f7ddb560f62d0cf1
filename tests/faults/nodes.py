"""Nodes of `torchrun --nnodes 1:N` that are lost and that join, and what the run does meanwhile.

    python -m tests.faults.nodes [--changes 20] [--nodes 3] [--seed 0] [--out FILE]

A node is an agent of torchrun on a port of this host, with one rank. It is lost by kill -9 of its
whole process group, or joins. After every change the run has to make steps again within LIMIT
seconds. In the end its metrics are those of one run: every step is there, once, in order. Exit
status 1 if not.
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

from tests.support.world import for_mpirun

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

    def __init__(self, most: int, root: Path) -> None:
        self.root, self.out = root, root / "run"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
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
                env=os.environ | for_mpirun() | {"CI": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose(self, number: int) -> None:
        agent = self.agents.pop(number)
        for pid in [agent.pid, *_descendants(agent.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def steps(self) -> int:
        """The steps that the metrics tell of."""
        with suppress(OSError, ValueError, IndexError):
            lines = (self.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            return int(json.loads(next(x for x in reversed(lines) if x.endswith(b"\n")))["step"])
        return 0

    def starts(self) -> int:
        with suppress(OSError):
            return (self.out / "starts.jsonl").read_bytes().count(b"\n")
        return 0


def changes(count: int, most: int, seed: int, root: Path) -> tuple[list[Change], str]:
    """So many changes of a run on up to `most` nodes, and what is wrong with what it has left."""
    random, nodes = Random(seed), Nodes(most, root)
    done: list[Change] = []
    try:
        for number in range(most):
            nodes.join(number)
        done.append(Change("all start", most, _await_steps(nodes, 0)))
        while len(done) <= count and done[-1].seconds is not None:
            sleep(random.uniform(0, 4))
            there, starts = sorted(nodes.agents), nodes.starts()
            # the first one has the store of the meeting
            may_go = [n for n in there if n]
            absent = [n for n in range(most) if n not in there]
            if may_go and (not absent or random.random() < 0.5):
                number = random.choice(may_go)
                nodes.lose(number)
                what = f"node {number} is lost"
            else:
                number = random.choice(absent)
                nodes.join(number)
                what = f"node {number} joins"
            done.append(Change(what, len(nodes.agents), _await_steps(nodes, starts)))
            print(done[-1], flush=True)
    finally:
        for number in list(nodes.agents):
            nodes.lose(number)
    return done, _fault(nodes.out)


def _await_steps(nodes: Nodes, starts: int) -> float | None:
    """Seconds until a run that has started anew has made steps; None after LIMIT."""
    begin = monotonic()
    while nodes.starts() <= starts:
        if monotonic() - begin > LIMIT:
            return None
        sleep(0.05)
    before = nodes.steps()
    while nodes.steps() <= before:
        if monotonic() - begin > LIMIT:
            return None
        sleep(0.05)
    return round(monotonic() - begin, 2)


def _fault(out: Path) -> str:
    """What is wrong with the metrics of a run that was often restarted."""
    steps = []
    for line in (out / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and (found := json.loads(line))["phase"] != "test":
            steps.append((found["step"], found["samples"]))
    wrong = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if b[0] <= a[0]]
    return f"steps {wrong[0]} follow each other" if wrong else ""


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.faults.__main__ import facts

    parser = argparse.ArgumentParser(prog="python -m tests.faults.nodes")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hybrid-nodes-") as root:
        done, fault = changes(options.changes, options.nodes, options.seed, Path(root))
    body: dict[str, Any] = facts(f"python -m tests.faults.nodes --changes {options.changes}")
    body |= {"changes": [asdict(change) for change in done], "fault": fault}
    if options.out is not None:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(fault or "every step is there once")
    return int(bool(fault) or any(change.seconds is None for change in done))


if __name__ == "__main__":
    sys.exit(main())
