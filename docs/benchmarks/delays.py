"""What delays that count micro-batches cost: trainings on virtual links.

    python docs/benchmarks/delays.py accuracy --data-dir ~/data    CIFAR-10's first 20,000 images
    python docs/benchmarks/delays.py long --data-dir ~/data        all 50,000 images, 30 epochs

ResNet-20, batch 128, one thread. Runs that are already in the JSON or in --runs are not repeated,
and one that was broken off goes on; --only-collect makes the table and JSON from what there is.
Times are of the virtual clock (10 Gb/s, 10 us). Several of these scripts may work on
different --seeds or --rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.settings.config import (
    CheckpointSettings,
    LinkSettings,
    OptimizerSettings,
    TrainSettings,
)
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay, Solver


@dataclass(frozen=True)
class Row:
    """One training."""

    blocks: int
    solver: Solver
    lr: float = 0.25
    epochs: int = 3
    images: int = 20_000
    model: str = "resnet20"


def accuracy() -> Iterator[tuple[str, Row]]:
    """Methods at equal epochs."""
    kinds: dict[str, tuple[int, Solver]] = {
        "serial": (1, Backprop()),
        "flushed, m=8": (4, Backprop(micro_batches=8)),
        "ddg, K=2, m=4": (2, DDG(micro_batches=4)),
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


def long() -> Iterator[tuple[str, Row]]:
    """Trained to convergence."""
    kinds: dict[str, tuple[int, Solver]] = {
        "serial": (1, Backprop()),
        "ddg, K=4, m=8": (4, DDG(micro_batches=8)),
        "flushed, K=2, m=8": (2, Backprop(micro_batches=8)),
        "ddg, K=2, m=8": (2, DDG(micro_batches=8)),
        "ddg, K=8, m=8": (8, DDG(micro_batches=8)),
    }
    for name, (K, solver) in kinds.items():
        yield name, Row(K, solver, 0.1, 30, images=50_000)


MINUTES = "minutes of training, simulated (K=2: at two ranks' measured rate)"
"""What a picture's axis of time shows, see `quiet_rates`."""

TABLES: Mapping[str, Any] = {"accuracy": accuracy, "long": long}


def train(row: Row, seed: int, data_dir: Path, out: Path) -> None:
    """One training into its run folder, from where an earlier one was broken off."""
    torch.set_num_threads(1)
    images, test = data.load("cifar10", data_dir, row.images)
    torch.manual_seed(seed)
    network = models.build(row.model, 10, 3, 32)
    long = row.epochs > 6
    Trainer(
        split(network, row.blocks),
        row.solver,
        train=TrainSettings(
            epochs=row.epochs, seed=seed, threads=1, evaluate_every=3 if long else 100
        ),
        optimizer=OptimizerSettings(lr=row.lr),
        links=LinkSettings(kind="virtual", gigabits_per_second=10.0),
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


def curve(metrics: Path) -> list[tuple[int, float]]:
    """(epoch, test accuracy) at every test, of a run that goes on, too."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["epoch"], line["test_accuracy"]) for line in lines if line["phase"] == "test"]


def plot(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Test error against time, at the rates of a quiet machine, and epochs."""
    from matplotlib.figure import Figure

    rates = quiet_rates()
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for title, row in rows.items():
        minutes = 50_000 / rates[title] / 60
        for seed, kept in row.items():
            epochs, values = zip(*kept["curve"], strict=True)
            errors = [100 * (1 - value) for value in values]
            label = f"{title}, seed {seed}" + ("" if "seconds" in kept else ", goes on")
            panels[0].plot([minutes * e for e in epochs], errors, marker="o", ms=3, label=label)
            panels[1].plot(epochs, errors, marker="o", ms=3)
    panels[0].set_xlabel(MINUTES)
    panels[1].set_xlabel("epochs of 50,000 images")
    panels[0].set_ylabel("test error, %")
    panels[0].set_yscale("log")
    panels[0].set_yticks([10, 15, 20, 30, 40], ["10", "15", "20", "30", "40"])
    panels[0].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def quiet_rates() -> dict[str, float]:
    """Images/s of ResNet-20: by the virtual clock, of two blocks on two ranks."""
    here, model = Path(__file__).parent, "ResNet-20, "
    virtual = json.loads((here / "virtual_rates.json").read_text())
    rates = {k.removeprefix(model): median(v) for k, v in virtual.items() if k.startswith(model)}
    real = json.loads((here / "no-bubble/resnet20-shared-memory.json").read_text())
    names = {"backprop, m=8": "flushed, K=2, m=8", "ddg, m=8": "ddg, K=2, m=8"}
    for row in real["speeds"]:
        if row["name"] in names:
            rates[names[row["name"]]] = median(row["images_per_second"])
    return rates


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
