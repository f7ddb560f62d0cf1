"""Images a second and peak memory of training on one GPU: a plain loop, and 1 to 8 blocks.

    python docs/benchmarks/gpu_training.py [--models resnet20,resnet110,wrn-28-10] [--steps 40]
        [--turns 3] [--precision bfloat16] [--out FILE]

The rows take turns. Blocks are threads of one process with a stream each; `graphs` replays local
steps (of the plain loop: the whole step) as CUDA graphs. The hybrid's rate counts the images of
its serial and its parallel phase, so it trains twice on each; `rounds` says how many of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hybrid import Trainer, data, models, split
from hybrid.config import CheckpointSettings, OptimiserSettings, TrainSettings
from hybrid.optimisers import make
from solvers import AugmentedLagrangian
from solvers.graphs import StepGraphs

BATCH = 128


def plain(name: str, steps: int, precision: str, device: str, graphs: bool) -> Callable[[], float]:
    """A loop over one mini-batch; gives images a second."""
    torch.manual_seed(0)
    model = models.build(name, 10, 3, 32).to(device, memory_format=torch.channels_last).train()
    sgd = make(model, OptimiserSettings())
    images = torch.randn(BATCH, 3, 32, 32, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH,), device=device)
    dtype = getattr(torch, precision)

    def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
        wide = dtype is torch.float32
        with torch.autocast(
            device, dtype=None if wide else dtype, enabled=not wide, cache_enabled=False
        ):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return (loss.detach(),)

    captured = StepGraphs(list(model.parameters())) if graphs else None

    def run() -> float:
        wait(device)
        start = perf_counter()
        for _ in range(steps):
            if captured is None:
                compute(images, labels)
            else:
                captured("step", compute, images, labels)
            sgd.step()
            sgd.zero_grad(set_to_none=True)
        wait(device)
        if captured is not None and captured.reason:
            raise RuntimeError(captured.reason)
        return steps * BATCH / (perf_counter() - start)

    return run


def hybrid(
    name: str, steps: int, precision: str, device: str, blocks: int, graphs: bool, kernels: str
) -> Callable[[], float]:
    """K blocks, one epoch of `steps` mini-batches; gives images a second of both phases."""
    train, test = (d.take(steps * BATCH) for d in data.load("synthetic"))
    test = test.take(BATCH)

    def run() -> float:
        torch.manual_seed(0)
        cut = split(models.build(name, 10, 3, 32), blocks)
        settings = TrainSettings(
            epochs=2,
            batch_size=BATCH,
            precision=precision,
            device=device,
            graphs=graphs,
            kernels=kernels,
            evaluate_every=2,
        )
        trainer = Trainer(
            cut,
            AugmentedLagrangian(),
            window=8,
            train=settings,
            checkpoint=CheckpointSettings(),
            quiet=True,
        )
        summary = trainer.fit(train, test)
        for reason in summary["graphs"]:
            if graphs and not reason.isdigit():
                raise RuntimeError(reason)
        return 2 * float(summary["images_per_second"])

    return run


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rows(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row, measured in turns; a row that fails says why."""
    common = name, options.steps, options.precision, options.device
    gpu = options.device == "cuda"
    makers: dict[str, Callable[[], Callable[[], float]]] = {
        "plain loop": lambda: plain(*common, False),
        **{
            f"hybrid, K = {k}": lambda k=k: hybrid(*common, k, False, "auto")  # type: ignore[misc]
            for k in options.blocks
        },
    }
    if gpu:
        makers["plain loop, graphs"] = lambda: plain(*common, True)
        makers["hybrid, K = 4, kernels by torch"] = lambda: hybrid(*common, 4, False, "torch")
        for k in options.blocks:
            makers[f"hybrid, K = {k}, graphs"] = lambda k=k: hybrid(*common, k, True, "auto")  # type: ignore[misc]
    rates: dict[str, list[float]] = {row: [] for row in makers}
    memory: dict[str, int] = dict.fromkeys(makers, 0)
    failed: dict[str, str] = {}
    for turn in range(options.turns + 1):
        for row, maker in makers.items():
            if row in failed:
                continue
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                run = maker()
                run()  # warms up
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


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| model | row | images/s, quartiles | peak memory, MB | |", "|---|---|---|---|---|"]
    for row in found:
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = [row for name in options.models.split(",") for row in rows(name, options)]
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {options.precision}\n\n{table(found)}")
    if options.out is not None:
        options.out.write_text(json.dumps({"card": card, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
