"""What delays that count micro-batches cost, and what mends the rest: trainings on virtual links.

    python docs/benchmarks/delays.py accuracy --data-dir ~/data    CIFAR-10's first 20,000 images
    python docs/benchmarks/delays.py mends --data-dir ~/data       one change each, K = 8 and 4
    python docs/benchmarks/delays.py long --data-dir ~/data        all 50,000 images, 30 epochs

ResNet-20, batch 128, one thread. Runs that are already in the JSON or in --runs are not repeated,
and one that was broken off goes on; --only-collect makes the table and JSON from what there is.
Times are of the virtual clock (10 Gb/s, 10 us). Several of these scripts may work on different
--seeds or --rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, ClassVar

import torch

from hybrid import Trainer, data, models, split
from hybrid.settings.config import (
    CheckpointSettings,
    LinkSettings,
    OptimiserSettings,
    TrainSettings,
)
from solvers import DDG, FDG, AugmentedLagrangian, Backprop, FeaturesReplay, Solver
from solvers.base import program_of
from solvers.ddg import StashingProgram
from solvers.passes.exact import ExactPass, PassSettings
from solvers.passes.micro import MicroBatch
from solvers.windows import PhaseStats, Window


@dataclass(frozen=True)
class Mended(DDG):
    """`DDG` with what is said to help a delay, each off unless asked for.

    rise: learning rates begin at lr / (1 + tau)^p, tau = d_k / m, p falls from 1 to 0 within this
    share of the training (after PipeMare's T1, arXiv 1910.05124).
    flushed: epochs of a pipelined pass at the start.
    spike: w <- w - lr (a v + b g), a = M^tau, b = (1 - M^tau) / (1 - M) for momentum M (Kosson et
    al., arXiv 2003.11666); tau = 1 is Nesterov's.
    """

    name: ClassVar[str] = "mended-ddg"

    rise: float = 0.0
    flushed: int = 0
    spike: bool = False
    total_steps: int = 0
    steps_per_epoch: int = 0


@program_of(Mended)
class MendedProgram(StashingProgram):
    """One rank's ticks, mended."""

    solver: Mended

    def begin(self) -> None:
        super().begin()
        solver, size = self.solver, self.setup.batch_size
        self._tau = self._delay / solver.parts(size)
        passes = PassSettings(micro_batches=solver.parts(size))
        self._exact = ExactPass(passes, self.block, self.links, self.setup)

    def train(self, window: Window) -> PhaseStats:
        if window.batches[0].step < self.solver.flushed * self.solver.steps_per_epoch:
            return self._exact.train(window)
        return super().train(window)

    def _step(self, part: MicroBatch) -> None:
        scheduled = self._rate
        if self.solver.rise:
            done = part.step / (self.solver.rise * self.solver.total_steps)
            self._rate = scheduled * (1 + self._tau) ** -(1 - min(done, 1.0))
        (group,) = [g for g in self.block.optimisers["local"].param_groups if g["weight_decay"]]
        decay, momentum = group["weight_decay"], group["momentum"]
        decayed = set(group["params"])
        before = []
        if self.solver.spike and part.ends:
            for p in self.block.module.parameters():
                assert p.grad is not None
                before.append(p.grad + decay * p.detach() if p in decayed else p.grad.clone())
        super()._step(part)
        a = momentum**self._tau
        b = (1 - a) / (1 - momentum)
        for p, g in zip(self.block.module.parameters(), before, strict=False):
            v = self.block.optimisers["local"].state[p]["momentum_buffer"]
            p.data.add_((1 - b) * g + (momentum - a) * v, alpha=self._rate)  # less Nesterov's own
        self._rate = scheduled


@dataclass(frozen=True)
class Row:
    """One training."""

    blocks: int
    solver: Solver
    lr: float = 0.25
    epochs: int = 3
    momentum: float = 0.9
    images: int = 20_000
    rounds: tuple[int, int] | None = None
    """(window, correct_every): every so many windows of so many mini-batches serially."""
    cuts: tuple[str, ...] = ()
    model: str = "resnet20"


UNEVEN = ("layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.1", "layer2.2", "layer3.0")
"""K = 8 with a long last block: less of the network is late, and the others wait for it."""


def accuracy() -> Iterator[tuple[str, Row]]:
    """Methods at equal epochs."""
    kinds: dict[str, tuple[int, Solver]] = {
        "serial": (1, Backprop()),
        "flushed, m=8": (4, Backprop(micro_batches=8)),
        "ddg, K=2, m=8": (2, DDG(micro_batches=8)),
        "ddg, K=4, m=8": (4, DDG(micro_batches=8)),
        "ddg, K=8, m=8": (8, DDG(micro_batches=8)),
        "ddg, K=8, m=16": (8, DDG(micro_batches=16)),
        "fdg, K=4, m=8": (4, FDG(micro_batches=8)),
        "features-replay, K=4, m=8": (4, FeaturesReplay(micro_batches=8)),
    }
    for lr in (0.25, 0.1):
        for epochs in (3, 6):
            for name, (K, solver) in kinds.items():
                yield f"{name}, lr {lr}, {epochs} epochs", Row(K, solver, lr, epochs)
    for name in ("serial", "flushed, m=8", "ddg, K=8, m=8", "ddg, K=8, m=16"):
        K, solver = kinds[name]
        deep = Row(K if K == 1 else 8, solver, 0.1, 6, model="resnet56")
        yield f"{name}, ResNet-56, lr 0.1, 6 epochs", deep


def mends() -> Iterator[tuple[str, Row]]:
    """One change each."""
    for K, m in ((8, 8), (4, 4)):
        plain, at = Mended(micro_batches=m), f"K={K}, m={m}"
        yield f"nothing, {at}", Row(K, plain)
        yield f"rate rises over 1/4, {at}", Row(K, replace(plain, rise=0.25))
        yield f"rate rises over all, {at}", Row(K, replace(plain, rise=1.0))
        yield f"first epoch flushed, {at}", Row(K, replace(plain, flushed=1))
        spiked = replace(plain, spike=True)
        yield f"spike compensation, {at}", Row(K, spiked)
        for momentum in (0.95, 0.99):
            lr = 2.5 * (1 - momentum)
            yield f"momentum {momentum}, {at}", Row(K, plain, lr, momentum=momentum)
            yield f"momentum {momentum}, spike, {at}", Row(K, spiked, lr, momentum=momentum)
        yield f"one window in 5 of 8 flushed, {at}", Row(K, plain, rounds=(8, 5))
        yield f"one window in 2 of 8 flushed, {at}", Row(K, plain, rounds=(8, 2))
        yield f"lr 0.15, {at}", Row(K, plain, 0.15)
        yield f"lr 0.4, {at}", Row(K, plain, 0.4)
        yield f"features-replay, {at}", Row(K, FeaturesReplay(micro_batches=m))
        if K == 8:
            yield f"a long last block, {at}", Row(K, plain, cuts=UNEVEN)
    yield "flushed, m=8", Row(8, Backprop(micro_batches=8))
    yield "flushed, m=8, lr 0.4", Row(8, Backprop(micro_batches=8), 0.4)


def long() -> Iterator[tuple[str, Row]]:
    """Trained to convergence."""
    kinds: dict[str, tuple[int, Solver]] = {
        "serial": (1, Backprop()),
        "ddg, K=4, m=8": (4, DDG(micro_batches=8)),
        "flushed, K=2, m=8": (2, Backprop(micro_batches=8)),
        "ddg, K=2, m=8": (2, DDG(micro_batches=8)),
        "ddg, K=8, m=8": (8, DDG(micro_batches=8)),
        "augmented-lagrangian, gaps filled, K=4": (4, AugmentedLagrangian()),
    }
    for name, (K, solver) in kinds.items():
        yield name, Row(K, solver, 0.1, 30, images=50_000)


TABLES: Mapping[str, Any] = {"accuracy": accuracy, "mends": mends, "long": long}


def train(row: Row, seed: int, data_dir: Path, out: Path) -> None:
    """One training into its run folder, from where an earlier one was broken off."""
    torch.set_num_threads(1)
    images, test = data.load("cifar10", data_dir, row.images)
    torch.manual_seed(seed)
    network = models.build(row.model, 10, 3, 32)
    blocks = split(network, None if row.cuts else row.blocks, cuts=list(row.cuts) or None)
    solver, steps = row.solver, len(images) // 128
    if isinstance(solver, Mended):
        solver = replace(solver, total_steps=steps * row.epochs, steps_per_epoch=steps)
    long = row.epochs > 6
    Trainer(
        blocks,
        solver,
        window=row.rounds[0] if row.rounds else None,
        correct_every=row.rounds[1] if row.rounds else None,
        train=TrainSettings(
            epochs=row.epochs, seed=seed, threads=1, evaluate_every=3 if long else 100
        ),
        optimiser=OptimiserSettings(lr=row.lr, momentum=row.momentum),
        links=LinkSettings(kind="virtual"),
        checkpoint=CheckpointSettings(every=1 if long else 100, keep_last=1),
        out=out,
        resume=(out / "checkpoints").exists(),
        names={"model": row.model, "data": "cifar10"},
    ).fit(images, test)


def collect(name: str, runs: Path, seeds: list[int]) -> None:
    """The JSON of all runs there are, on top of what it holds, and a table of means."""
    file = raw(name)
    rows: dict[str, dict[str, dict[str, Any]]] = known(file)
    for title, _ in TABLES[name]():
        for seed in seeds:
            folder = runs / slug(title, seed)
            kept = of_summary(folder)
            if name == "long" and (folder / "metrics.jsonl").exists():
                kept = {**(kept or {}), "curve": curve(folder / "metrics.jsonl")}
            if kept is not None:
                rows.setdefault(title, {})[str(seed)] = kept
    file.write_text(json.dumps(rows, indent=1) + "\n")
    if name == "long":
        plot(file.with_suffix(".png"), rows)
    print("| run | test accuracy | seeds | images/s | idle share |\n|---|---|---|---|---|")
    for title, all_ in rows.items():
        row = {seed: v for seed, v in all_.items() if "seconds" in v}
        if not row:
            continue
        values = [100 * v["test_accuracy"] for v in row.values()]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        rate = mean(v["images_per_second"] for v in row.values())
        idle = mean(mean(v["idle_share"]) for v in row.values())
        print(f"| {title} | {mean(values):.2f}{spread} % | {len(row)} | {rate:.0f} | {idle:.0%} |")


def raw(name: str) -> Path:
    """Where a table's figures are kept."""
    return Path(__file__).with_name(f"delays-{name}.json")


def known(file: Path) -> dict[str, Any]:
    """The figures there are."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def of_summary(folder: Path) -> dict[str, Any] | None:
    """What is kept of a run that has ended."""
    if not (folder / "summary.json").exists():
        return None
    found = json.loads((folder / "summary.json").read_text())
    keys = "test_accuracy images_per_second idle_share bytes_sent"
    return {"seconds": found["train_seconds"]} | {k: found[k] for k in keys.split()}


def curve(metrics: Path) -> list[tuple[int, float, float]]:
    """(epoch, seconds of training, test accuracy) at every test, of a run that goes on, too.

    Seconds at the median rate of the reports: a run may have stood still meanwhile.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rate = median(x["samples"] / x["seconds"] for x in lines if x.get("seconds"))
    found, images = [], 0
    for line in lines:
        images += line.get("samples", 0)
        if line["phase"] == "test":
            found.append((line["epoch"], round(images / rate, 1), line["accuracy"]))
    return found


def plot(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Test error against time and epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for title, row in rows.items():
        for seed, kept in row.items():
            epochs, seconds, values = zip(*kept["curve"], strict=True)
            errors = [100 * (1 - value) for value in values]
            label = f"{title}, seed {seed}" + ("" if "seconds" in kept else ", goes on")
            panels[0].plot([s / 60 for s in seconds], errors, marker="o", ms=3, label=label)
            panels[1].plot(epochs, errors, marker="o", ms=3)
    panels[0].set_xlabel("minutes of training, a core a block, by the virtual clock")
    panels[1].set_xlabel("epochs of 50,000 images")
    panels[0].set_ylabel("test error, %")
    panels[0].set_yscale("log")
    panels[0].set_yticks([10, 15, 20, 30, 40], ["10", "15", "20", "30", "40"])
    panels[0].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def slug(title: str, seed: int) -> str:
    """Of a run folder."""
    return f"{title}, seed {seed}".replace(", ", "_").replace(" ", "-").replace("/", "-of-")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--runs", type=Path, default=Path("runs/delays"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    parser.add_argument("--only-collect", action="store_true")
    options = parser.parse_args()
    if not options.only_collect:
        for seed in options.seeds:
            for title, row in TABLES[options.table]():
                out = options.runs / slug(title, seed)
                done = "seconds" in known(raw(options.table)).get(title, {}).get(str(seed), {})
                if options.rows in title and not done and not (out / "summary.json").exists():
                    out.parent.mkdir(parents=True, exist_ok=True)
                    train(row, seed, options.data_dir, out)
    collect(options.table, options.runs, options.seeds)


if __name__ == "__main__":
    main()
