"""Images a second and peak memory of training on one GPU: a plain loop, and 1 to 8 blocks.

    python docs/benchmarks/gpu_training.py [--models resnet20,resnet110,wrn-28-10] [--steps 20]
        [--turns 2] [--precision bfloat16] [--out FILE]

The rows take turns. Blocks are threads of one process with a stream each, whose launches take turns
in Python and in autograd's one thread a device. The hybrid's rate counts the images of its serial
and of its parallel phase, since it trains on each twice.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hybrid import Trainer, data, split
from hybrid.links import threads
from hybrid.method.optimizers import make_optimizer
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import AugmentedLagrangian

BATCH = 128


def plain(name: str, steps: int, precision: str, device: str) -> Callable[[], float]:
    """A loop over the data; gives images a second."""
    torch.manual_seed(0)
    model = models.build(name, 10, 3, 32).to(device, memory_format=torch.channels_last).train()
    sgd = make_optimizer(model, OptimizerSettings())
    train, _ = data.load("synthetic")
    wide, dtype = precision == "float32", getattr(torch, precision)

    def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast(device, None if wide else dtype, not wide, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return (loss.detach(),)

    def run() -> float:
        wait(device)
        start = perf_counter()
        for ids in torch.arange(steps * BATCH).split(BATCH):
            images, labels = train.batch(ids, 0, 0).to(device), train.targets(ids).to(device)
            compute(images, labels)
            sgd.step()
            sgd.zero_grad(set_to_none=True)
        wait(device)
        return steps * BATCH / (perf_counter() - start)

    run()  # warms up
    return run


def hybrid(
    name: str, steps: int, precision: str, device: str, blocks: int, kernels: str
) -> Callable[[], float]:
    """K blocks; gives images a second of both phases, after the first epoch."""
    train, test = (d.take(steps * BATCH) for d in data.load("synthetic"))

    def seconds(epochs: int) -> float:
        torch.manual_seed(0)
        settings = TrainSettings(
            epochs=epochs,
            batch_size=BATCH,
            precision=precision,
            device=device,
            kernels=kernels,
            evaluate_every=epochs,
        )
        cut = split(models.build(name, 10, 3, 32), blocks, balance="operations")
        trainer = Trainer(cut, AugmentedLagrangian(), window=10, train=settings, quiet=True)
        summary = trainer.fit(train, test.take(BATCH))
        return float(summary["train_seconds"])

    def run() -> float:
        # what the first epoch spends on warm-up drops out
        first, both = seconds(1), seconds(3)
        return 2 * 2 * steps * BATCH / (both - first)

    return run


def on_one_stream(run: Callable[[], float]) -> Callable[[], float]:
    """The same with the blocks' work in one queue."""

    def patched() -> float:
        stream = threads.separate_stream
        threads.separate_stream = lambda size: nullcontext()  # type: ignore[assignment, return-value]
        try:
            return run()
        finally:
            threads.separate_stream = stream

    return patched


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rows(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row, measured in turns; a row that fails says why."""
    common = name, options.steps, options.precision, options.device
    gpu = options.device == "cuda"
    makers: dict[str, Callable[[], Callable[[], float]]] = {
        "plain loop": lambda: plain(*common),
        **{f"hybrid, K = {k}": partial(hybrid, *common, k, "auto") for k in options.blocks},
    }
    if gpu:
        makers["hybrid, K = 4, kernels by torch"] = partial(hybrid, *common, 4, "torch")
        makers["hybrid, K = 4, one stream"] = lambda: on_one_stream(hybrid(*common, 4, "auto"))
    rates: dict[str, list[float]] = {row: [] for row in makers}
    memory: dict[str, int] = dict.fromkeys(makers, 0)
    failed: dict[str, str] = {}
    for turn in range(options.turns + 1):
        for row, maker in makers.items():
            if row in failed:
                continue
            run = None
            if gpu:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                run = maker()
                rate = run()
            except (RuntimeError, ValueError) as error:
                failed[row] = " ".join(str(error).split())[:200]
                continue
            if turn:
                rates[row].append(rate)
            memory[row] = torch.cuda.max_memory_allocated() if gpu else 0
    return [
        {
            "model": name,
            "row": row,
            "images_per_second": [round(q, 1) for q in quantiles(r, n=4)] if len(r) > 1 else r,
            "peak_memory_mb": round(memory[row] / 1e6),
            "failed": failed.get(row, ""),
        }
        for row, r in rates.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | row | images/s, quartiles | peak memory, MB | |", "|---|---|---|---|---|"]
    for row in rows:
        rates = ", ".join(f"{rate:,.0f}" for rate in row["images_per_second"])
        cells = (row["model"], row["row"], rates, row["peak_memory_mb"], row["failed"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet20,resnet110,wrn-28-10")
    parser.add_argument(
        "--blocks", type=lambda t: [int(k) for k in t.split(",")], default=[1, 2, 4, 8]
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_training: torch {torch.__version__} sees no GPU: take --device cpu")
    lines = [row for name in options.models.split(",") for row in rows(name, options)]
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {options.precision}\n\n{table(lines)}")
    if options.out is not None:
        options.out.write_text(json.dumps({"card": card, "rows": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
