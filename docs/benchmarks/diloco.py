"""DiLoCo beside a delayed pipeline: bits a byte, rates, and bits after equal simulated time.

    python docs/benchmarks/diloco.py screen accuracy [--rows "R=8, H=100"]

    screen      gpt-8-64 for 375 steps on eight replicas: rates of the inner and the outer step
    accuracy    the same for 1,500 steps with the best rates, by the steps H between two sums

The text, the mini-batches of 32 texts of 128 bytes (of all replicas together) and the optimizers
are those of to_the_end.py gpt: both have the same samples in the same order. Each training runs on
the virtual clock with one thread. A training that was broken off goes on from its checkpoint, and
those that are in diloco.json are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import measuring
import to_the_end
import torch

from hybrid.networks import models
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.sync.diloco import DiLoCo

RAW = measuring.Raw(__file__)


@dataclass(frozen=True)
class Row:
    """One training of gpt-8-64."""

    sync: DiLoCo | None = None
    """How replicas keep together; None: one replica."""
    replicas: int = 1
    blocks: int = 1
    """More than one: of a delayed pipeline."""
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = 0.02
    """Of each replica's own steps."""
    steps: int = 1500


BEST = DiLoCo(outer_lr=0.7, outer_momentum=0.9, messages="int8")
"""The outer step, of the screen."""
INNER_LR = 0.02
"""Of Muon, of the screen."""
SHORT, MIDDLE = 375, 750


def screen() -> Iterator[tuple[str, Row]]:
    """Eight replicas; 15 outer steps, as many as 1,500 steps have with H = 100."""
    for lr in 0.02, 0.04:
        for eta, mu in (0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0), (1.0, 0.9):
            outer = DiLoCo(steps=25, outer_lr=eta, outer_momentum=mu, messages="int8")
            title = f"lr {lr}, outer lr {eta}, momentum {mu}"
            yield title, Row(outer, 8, lr=lr, steps=SHORT)


def accuracy() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""

    def row(R: int, H: int, steps: int = 1500, **changes: Any) -> tuple[str, Row]:
        outer = replace(BEST, steps=H, messages=changes.pop("messages", "int8"))
        title = f"R={R}, H={H}" + f", {outer.messages}" * (outer.messages != "int8")
        title += ", AdamW" * (changes.get("optimizer") == "adamw")
        title += f", {steps} steps" * (steps != 1500)
        return title, Row(outer, R, **{"lr": INNER_LR, "steps": steps, **changes})

    yield from (row(8, 100), row(8, 25), row(4, 100), row(8, 50), row(8, 200), row(8, 12))
    for steps in SHORT, MIDDLE:
        yield f"one rank, {steps} steps", Row(steps=steps)
        yield f"ddg, K=8, {steps} steps", Row(blocks=8, steps=steps)
    yield from (row(8, 100, MIDDLE), row(8, 25, MIDDLE))
    yield from (row(4, 25), row(4, 50), row(4, 200), row(4, 12))
    yield row(8, 100, messages="float32")
    yield row(8, 100, optimizer="adamw", lr=to_the_end.BEST["AdamW"])
    yield "ddg, K=4", Row(blocks=4)


TABLES = {"screen": screen, "accuracy": accuracy}


def train(row: Row, seed: int, out: Path) -> None:
    """One training into its run folder, from where an earlier one was broken off."""
    solver = DDG(micro_batches=to_the_end.M) if row.blocks > 1 else Backprop()
    windows = row.steps * to_the_end.SIZE
    optimizer = to_the_end.of_text(row.optimizer, row.lr)
    as_there = to_the_end.Row(row.blocks, solver, optimizer, windows=windows)
    texts, held_out = to_the_end.samples(as_there, measuring.DATA, out.parent)
    torch.manual_seed(seed)
    measuring.on_virtual_links(
        *(models.gpt(8, 64, 256, to_the_end.LENGTH), row.blocks, solver),
        train={"epochs": 1, "batch_size": to_the_end.SIZE, "seed": seed},
        schedule={"warmup_epochs": to_the_end.WARM_UP},
        optimizer=optimizer,
        delay={"mend": "extrapolate" if row.blocks > 1 else "none"},
        checkpoint={"every": 1, "minutes": 5, "keep_last": 1},
        out=out,
        resume=(out / "checkpoints").exists(),
        names={"model": "gpt-8-64"},
        quiet=False,
        **({"replicas": row.replicas, "sync": row.sync} if row.sync else {}),
    ).fit(texts, held_out)


def collect(runs: Path, seeds: list[int]) -> None:
    """The results of all runs there are, on top of what the JSON holds."""
    for name, rows in TABLES.items():
        for title, row in rows():
            for seed in seeds:
                folder = runs / name / measuring.slug(title, seed)
                kept = measuring.of_summary(folder, "images_per_second bytes_sent")
                if kept is not None:
                    metrics = json.loads((folder / "summary.json").read_text())["test_metrics"]
                    kept |= {"steps": row.steps, "bits_per_byte": metrics["bits_per_byte"]}
                    RAW.keep(name, title, str(seed), value=kept)


def main() -> None:
    options = measuring.options(
        __doc__, whats=TABLES, runs=Path("runs/diloco"), seeds=[0], rows="", only_collect=False
    )
    torch.set_num_threads(1)
    for name in () if options.only_collect else options.whats:
        for title, row in TABLES[name]():
            for seed in options.seeds if title.startswith(options.rows) else ():
                out = options.runs / name / measuring.slug(title, seed)
                done = RAW.get(name, title, str(seed)) or (out / "summary.json").exists()
                if not done:
                    out.parent.mkdir(parents=True, exist_ok=True)
                    train(row, seed, out)
    collect(options.runs, options.seeds)


if __name__ == "__main__":
    main()
