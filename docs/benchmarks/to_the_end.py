"""A pipeline that never waits, trained to the end, beside serial and flushed trainings.

    python docs/benchmarks/to_the_end.py resnet20 --data-dir ~/data [--seeds 0 1 2] [--rows "ddg"]
    python docs/benchmarks/to_the_end.py --only-collect

    resnet20    ResNet-20 on all 50,000 images of CIFAR-10, mini-batches of 128
    resnet56    the same of ResNet-56
    gpt         gpt-8-64 on 6.1 MB of Python's library, mini-batches of 32 texts of 128 bytes
    gpt-rates   for a quarter of the steps, flushed, at several learning rates

One thread, on the virtual clock, mini-batches in 8 micro-batches. Each optimizer has the learning
rate that was best for its flushed run in a screen: of tolerance.py, of gpt-rates. Sixteen blocks
are eight blocks with sixteen blocks' delays, since ResNet-20 has eleven units and the GPT ten.

A training that was broken off goes on from its checkpoint. Those that are in to_the_end.json are
not repeated; several of these programs may work on different --rows or --seeds.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import measuring
import torch
from tolerance_optimizers import Late

from hybrid import data
from hybrid.data import Data
from hybrid.files import write_atomically
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, Backprop, Solver

RAW = measuring.Raw(__file__)
M, WARM_UP = 8, 0.1
SGD = OptimizerSettings(lr=0.25)
MUON = OptimizerSettings(name="muon", lr=0.2)


@dataclass(frozen=True)
class Row:
    """One training."""

    blocks: int
    solver: Solver
    optimizer: OptimizerSettings
    mend: Literal["none", "extrapolate"] = "none"
    epochs: int = 10
    depth: int = 20
    """Of the ResNet."""
    windows: int = 0
    """Of the text to train on; 0: it is images."""


LATE: dict[int, Solver] = {
    4: DDG(micro_batches=M),
    8: DDG(micro_batches=M),
    16: Late(micro_batches=M, ticks=15),
}
"""By the number of blocks."""


def resnet20() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""
    yield "flushed, Muon", Row(1, Backprop(micro_batches=M), MUON)
    for K in 8, 16:
        yield f"ddg, Muon, extrapolated, K={K}", Row(8, LATE[K], MUON, "extrapolate")
    yield "serial, SGD", Row(1, Backprop(), SGD)
    yield "ddg, Muon, extrapolated, K=4", Row(4, LATE[4], MUON, "extrapolate")
    yield "ddg, SGD, K=8", Row(8, LATE[8], SGD)
    yield "serial, Muon", Row(1, Backprop(), MUON)
    yield "ddg, SGD, K=16", Row(8, LATE[16], SGD)
    yield "ddg, SGD, K=4", Row(4, LATE[4], SGD)


def resnet56() -> Iterator[tuple[str, Row]]:
    """Blocks of a deeper network, 32 of which are its 16 with the delays of 32."""
    yield "flushed, Muon", Row(1, Backprop(micro_batches=M), MUON, depth=56)
    for K, blocks, ticks in (8, 8, 7), (16, 16, 15), (32, 16, 31):
        late = Late(micro_batches=M, ticks=ticks)
        row = Row(blocks, late, MUON, "extrapolate", depth=56)
        yield f"ddg, Muon, extrapolated, K={K}", row


WINDOWS, SIZE, LENGTH = 48_000, 32, 128
RATES = {
    "Muon": ("muon", (0.02, 0.04, 0.01)),
    "AdamW": ("adamw", (1e-3, 2e-3, 4e-3)),
    "NAdam": ("nadamw", (1e-3, 2e-3, 4e-3)),
}
VECTORS_RATE = 2e-3
"""Of AdamW, which steps vectors, embeddings and the output layer beside Muon."""


def of_text(name: str, lr: float) -> OptimizerSettings:
    """An optimizer for the GPT."""
    if name == "muon":
        return OptimizerSettings(
            name=name, lr=lr, weight_decay=0.01, vectors="adamw", vectors_lr=VECTORS_RATE
        )
    return OptimizerSettings(name=name, lr=lr, weight_decay=0.01)


def gpt_rates() -> Iterator[tuple[str, Row]]:
    """Of a quarter of the steps."""
    flushed = Backprop(micro_batches=M)
    for title, (name, rates) in RATES.items():
        for lr in rates:
            row = Row(1, flushed, of_text(name, lr), epochs=1, windows=WINDOWS // 4)
            yield f"{title}, flushed, lr {lr}", row


BEST = {"AdamW": 1e-3, "NAdam": 1e-3, "Muon": 0.02}
"""Muon's of two; AdamW's is the best of three on gpt-8-128; NAdam's is not known yet."""


def gpt() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""

    def row(title: str, K: int, mend: Literal["none", "extrapolate"] = "none") -> tuple[str, Row]:
        name = f"{title}, flushed"
        blocks, solver = (1, Backprop(micro_batches=M)) if K == 1 else (min(K, 8), LATE[K])
        if K > 1:
            name = f"ddg, {title}{', extrapolated' if mend != 'none' else ''}, K={K}"
        optimizer = of_text(RATES[title][0], BEST[title])
        return name, Row(blocks, solver, optimizer, mend, epochs=1, windows=WINDOWS)

    yield from (row("Muon", 1), row("Muon", 8, "extrapolate"), row("AdamW", 1), row("AdamW", 8))
    yield from (row("AdamW", 8, "extrapolate"), row("Muon", 16, "extrapolate"), row("Muon", 8))
    yield from (row("AdamW", 16, "extrapolate"), row("NAdam", 1), row("NAdam", 8))
    yield from (row(title, 4, "extrapolate") for title in ("Muon", "AdamW"))


TABLES = {"resnet20": resnet20, "resnet56": resnet56, "gpt-rates": gpt_rates, "gpt": gpt}


def corpus(runs: Path) -> Path:
    """Python's library without its tests, as one file; it is under the PSF license."""
    file = runs / "python.txt"
    if not file.exists():
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
        sources = sorted(
            p for p in root.rglob("*.py") if not skipped & {*p.relative_to(root).parts}
        )
        runs.mkdir(parents=True, exist_ok=True)
        write_atomically(file, b"".join(p.read_bytes() for p in sources))
    return file


def samples(row: Row, data_dir: Path, runs: Path) -> tuple[Data, Data]:
    """What a row trains and is tested on."""
    if not row.windows:
        return data.load("cifar10", data_dir)
    text, held_out = data.load_text(corpus(runs), LENGTH)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
    return replace(text, starts=text.starts[order[: row.windows]]), held_out.take(2048)


def train(row: Row, seed: int, data_dir: Path, out: Path) -> None:
    """One training into its run folder, from where an earlier one was broken off."""
    train, test = samples(row, data_dir, out.parent)
    torch.manual_seed(seed)
    network = models.gpt(8, 64, 256, LENGTH) if row.windows else models.resnet(row.depth)
    size = SIZE if row.windows else 128
    measuring.on_virtual_links(
        *(network, row.blocks, row.solver),
        train={"epochs": row.epochs, "batch_size": size, "seed": seed},
        schedule={"warmup_epochs": WARM_UP * row.epochs},
        optimizer=row.optimizer,
        delay={"mend": row.mend},
        checkpoint={"every": 1, "minutes": 5, "keep_last": 1},
        out=out,
        resume=(out / "checkpoints").exists(),
        names={"model": "gpt-8-64" if row.windows else f"resnet{row.depth}"},
        quiet=False,
    ).fit(train, test)


def collect(runs: Path, seeds: list[int]) -> None:
    """The results of all runs there are, on top of what the JSON holds."""
    for name, rows in TABLES.items():
        for title, row in rows():
            for seed in seeds:
                folder = runs / name / measuring.slug(title, seed)
                kept = measuring.of_summary(folder)
                if kept is not None:
                    summary = json.loads((folder / "summary.json").read_text()).items()
                    kept |= {"epochs": row.epochs}
                    kept |= {k: v for k, v in summary if k.startswith("test_")}
                    kept["curve"] = measuring.curve(folder / "metrics.jsonl")
                    RAW.keep(name, title, str(seed), value=kept)


def main() -> None:
    flags = {**measuring.GRID, "seeds": [0], "tables": TABLES}
    options = measuring.options(__doc__, runs=Path("runs/to-the-end"), **flags)
    torch.set_num_threads(1)
    for seed in () if options.only_collect else options.seeds:
        for name in options.tables:
            for title, row in measuring.chosen(TABLES[name](), options):
                out = options.runs / name / measuring.slug(title, seed)
                done = RAW.get(name, title, str(seed)) or (out / "summary.json").exists()
                if not done:
                    out.parent.mkdir(parents=True, exist_ok=True)
                    train(row, seed, options.data_dir, out)
    if options.only_collect:
        collect(options.runs, options.seeds)


if __name__ == "__main__":
    main()
