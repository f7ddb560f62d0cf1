"""The small trainings that faults strike, and what an undisturbed one leaves."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.folder import checkpoint
from tests.faults.processes import Job

WAYS = {
    "serial": ("--solver", "backprop"),
    "local work": (
        *("--solver", "ddg", "--set", "fill.name=augmented-lagrangian"),
        *("--set", "solver.micro_batches=2"),
    ),
    "windows": ("--window", "4", "--sweeps", "2"),
    "kept windows": (
        *("--solver", "block-admm", "--window", "all"),
        *("--set", "rounds.correct_every=0"),
    ),
}
WITHOUT_BUBBLE = "without bubble"
ON_A_GRID = WAYS | {WITHOUT_BUBBLE: ("--solver", "ddg")}
FURTHER = {
    "heads": ("--solver", "local-updates", "--set", "solver.head=tests.faults.items:head"),
    "units": ("--solver", "pd-asgd", "--set", "solver.lag=1", "--set", "train.report_every=7"),
}
"""Ways that a campaign takes only where it is told to; units are of replicas of one block."""
_ROUNDS = ("--set", "sync.steps=5", "--set", "train.report_every=7")
"""A report, after which a run may stop, falls into the middle of a round."""
_LATE = (*_ROUNDS, "--set", "sync.lag=3")
SYNCS = {
    "all-reduce": (),
    "all-reduce of int8": ("--set", "sync.messages=int8", "--set", "train.report_every=7"),
    "local-sgd": ("--set", "sync.name=local-sgd", *_ROUNDS),
    "diloco": ("--set", "sync.name=diloco", *_LATE),
    "hpsgd": ("--set", "sync.name=hpsgd", *_LATE),
}
"""How replicas are kept together."""
GRIDS = [
    (way, sync)
    for sync in SYNCS
    for way in ON_A_GRID
    if sync != "hpsgd" or way in ("serial", WITHOUT_BUBBLE)  # steps of one kind
]
LR, SAMPLES = "0.1", 192
_SIZE = (
    *("--epochs", "3", "--batch-size", "8", "--lr", LR),
    *("--set", "train.threads=1", "--set", "train.evaluate_every=9"),
    *("--set", "checkpoint.keep_last=0"),
)


@dataclass(frozen=True)
class Training:
    """How a run is started."""

    way: str
    launcher: str
    """threads | mpirun | torchrun"""
    ranks: int
    """Blocks times replicas."""
    model: str = "resnet8"
    seed: int = 0
    replicas: int = 1
    sync: str = ""
    workers: int = 0
    """Processes that make a rank's mini-batches, of a data set that is the user's own."""
    apart: bool = False
    """Whether every rank has a disk of its own."""

    @property
    def blocks(self) -> int:
        """Of each replica."""
        return self.ranks // self.replicas

    @property
    def repeated(self) -> list[str]:
        """Words that a resume must repeat: code runs only if the command line says so."""
        return [*self.own_data, *(FURTHER["heads"][2:] if self.way == "heads" else ())]

    @property
    def own_data(self) -> list[str]:
        return ["--data", "tests.faults.items:digits"] if self.workers else []

    def words(self, out: Path) -> list[str]:
        """The command's words for a new run."""
        data = ["--set", f"data.limit={SAMPLES}"]
        if self.workers:
            data = [*self.own_data, "--set", f"data.workers={self.workers}"]
        named = ("--model", self.model, "--seed", str(self.seed))
        blocks = ("--blocks", str(self.blocks)) if self.launcher == "threads" else ()
        # what a machine's waits have room for differs from run to run, and with it the bits
        waits = [[2, 0], *[[0, 0]] * (self.blocks - 2), [0, 2]]
        filled = ("--set", f"rounds.local_budget={waits}") if self.way == "local work" else ()
        grid = ("--replicas", str(self.replicas), *SYNCS[self.sync]) if self.replicas > 1 else ()
        way = (*_SIZE, *data, *(ON_A_GRID | FURTHER)[self.way], *filled)
        return ["train", *way, *named, *blocks, *grid, "--out", str(out)]


def result(out: Path) -> dict[str, list[str]]:
    """What must be the same, bit for bit, however often a run that ended well was disturbed."""
    newest = checkpoint.complete(out / "checkpoints")[-1]
    units = checkpoint.read_manifest(newest)["units"]
    accuracy = json.loads((out / "summary.json").read_text())["test_accuracy"]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {
        "units": sorted(f"{name} {entry['sha256']}" for name, entry in units.items()),
        "test accuracy": [str(accuracy)],
        "metrics": [line.split('"seconds"')[0] for line in lines],
    }


def whole(out: Path) -> dict[str, dict[str, Any]]:
    """The readable checkpoints of a run folder, by step."""
    found = {}
    for folder in checkpoint.complete(out / "checkpoints"):
        try:
            manifest = checkpoint.read_manifest(folder)
            for name in manifest["units"]:
                checkpoint.load_unit(folder, manifest, name)
            for name in manifest["states"]:
                checkpoint.load_state(folder, manifest, name)
        except (ValueError, OSError):
            continue
        found[folder.name] = manifest
    return found


class References:
    """Undisturbed runs, each computed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = cache(self._folder)
        self.result = cache(lambda training: result(self.folder(training)))

    def _folder(self, training: Training) -> Path:
        alone = replace(training, launcher="threads")
        if alone != training:
            return self.folder(alone)
        grid = f"{alone.ranks}-{alone.replicas}-{alone.sync}-{alone.workers}"
        out = self.root / f"{alone.way}-{grid}-{alone.model}-{alone.seed}".replace(" ", "-")
        job = Job(alone.words(out), out.with_suffix(".err"), alone.ranks, "threads")
        if not job.wait(600) or job.status() != 0:
            job.kill()
            raise RuntimeError(f"the undisturbed {alone} failed: {job.output()}")
        return out

    def stopped(self, training: Training, out: Path, checkpoints: int) -> list[Path]:
        """A copy of the run as if it had ended after so many checkpoints."""
        shutil.copytree(self.folder(training), out)
        (out / "summary.json").unlink()
        found = checkpoint.complete(out / "checkpoints")
        for late in found[checkpoints:]:
            shutil.rmtree(late)
        return found[:checkpoints]
