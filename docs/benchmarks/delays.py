"""What delays that count micro-batches cost: trainings on virtual links.

    python docs/benchmarks/delays.py accuracy --data-dir ~/data    CIFAR-10's first 20,000 images
    python docs/benchmarks/delays.py long --data-dir ~/data        all 50,000 images, 30 epochs

ResNet-20, batch 128, one thread. Runs that are already in the JSON or in --runs are not repeated,
and one that was broken off goes on; --only-collect makes the table and JSON from what there is.
Times are of the virtual clock (10 Gb/s, 10 us). Several of these scripts may work on
different --seeds or --rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import measuring
import torch

from hybrid import data
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
    images, test = data.load("cifar10", data_dir, row.images)
    long = row.epochs > 6
    measuring.on_virtual_links(
        *(measuring.resnet(row.model, seed), row.blocks, row.solver),
        train={"epochs": row.epochs, "seed": seed, "evaluate_every": 3 if long else 100},
        optimizer={"lr": row.lr},
        checkpoint={"every": 1 if long else 100, "keep_last": 1},
        out=out,
        resume=(out / "checkpoints").exists(),
        names={"model": row.model, "data": "cifar10"},
        quiet=False,
    ).fit(images, test)


def collect(name: str, raw: measuring.Raw, runs: Path, seeds: list[int]) -> None:
    """The JSON of all runs there are, on top of what it holds, and a table of means."""
    rows: dict[str, dict[str, dict[str, Any]]] = raw.read()
    for title, _ in TABLES[name]():
        for seed in seeds:
            folder = runs / measuring.slug(title, seed)
            kept = measuring.of_summary(folder)
            if name == "long" and (folder / "metrics.jsonl").exists():
                kept = {**(kept or {}), "curve": measuring.curve(folder / "metrics.jsonl")}
            if kept is not None:
                rows.setdefault(title, {})[str(seed)] = kept
    raw.write(rows)
    if name == "long":
        plot(raw.file.with_suffix(".png"), rows)
    ended = {title: [v for v in row.values() if "seconds" in v] for title, row in rows.items()}
    measuring.show(
        "run | test accuracy | seeds | images/s | idle share",
        (
            (
                title,
                f"{measuring.spread([100 * v['test_accuracy'] for v in row], '.2f')} %",
                len(row),
                f"{mean(v['images_per_second'] for v in row):.0f}",
                f"{mean(mean(v['idle_share']) for v in row):.0%}",
            )
            for title, row in ended.items()
            if row
        ),
    )


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


def main() -> None:
    options = measuring.options(
        __doc__, table=TABLES, runs=Path("runs/delays"), **measuring.GRID | {"seeds": [0, 1, 2]}
    )
    raw = measuring.Raw(__file__, f"-{options.table}")
    torch.set_num_threads(1)
    for seed in () if options.only_collect else options.seeds:
        for title, row in measuring.chosen(TABLES[options.table](), options):
            out = options.runs / measuring.slug(title, seed)
            if "seconds" not in raw.get(title, str(seed)) and not (out / "summary.json").exists():
                out.parent.mkdir(parents=True, exist_ok=True)
                train(row, seed, options.data_dir, out)
    collect(options.table, raw, options.runs, options.seeds)


if __name__ == "__main__":
    main()
