"""Training on one GPU: images a second, launches of a step, and whether two runs have equal bits.

    python docs/benchmarks/gpu_training.py rates|launches|bits [--models resnet20,resnet50]
        [--device cuda] [--quick] [--seconds 120] [--out FILE]

A line of JSON for each row, as soon as it is measured. No row begins after `--seconds`. The plain
loop is hand-written, and its data lie on the card. Blocks are threads of one process with a stream
each. Rates of this package are those of the later epochs of three, by its summary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import Trainer, split
from hybrid.method.optimizers import make_optimizer
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, Solver

Row = Callable[[], dict[str, Any]]
SIZES = {"resnet20": (32, 10), "resnet50": (224, 1000)}
"""Pixels of a side, and classes."""
STEPS = {"resnet20": 100, "resnet50": 10}
"""Mini-batches of a measurement, which takes about a second."""
METHODS: dict[str, tuple[Solver, int]] = {
    "backprop, 1 block": (Backprop(), 1),
    "ddg, 4 blocks, m = 1": (DDG(micro_batches=1), 4),
    "ddg, 4 blocks, m = 8": (DDG(micro_batches=8), 4),
    "augmented Lagrangian, 4 blocks": (AugmentedLagrangian(), 4),
}
TURNS = 3


class Bench:
    """The rows of one part, for a device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.quick = options.device, options.quick
        self.gpu, self.batch = options.device == "cuda", 8 if options.quick else 128
        self.names = options.models.split(",")

    def network(self, name: str) -> nn.Module:
        """A model by name, with the weights of one seed."""
        torch.manual_seed(0)
        side, classes = SIZES[name]
        return models.build(name, classes, 3, side)

    def samples(self, name: str, steps: int) -> tuple[Tensor, Tensor]:
        """The same mini-batch `steps` times."""
        side, classes = SIZES[name]
        x = torch.randn(self.batch, 3, side, side).repeat(steps, 1, 1, 1)
        return x, torch.arange(len(x)) % classes

    def wait(self) -> None:
        """Wait for the card."""
        if self.gpu:
            torch.cuda.synchronize()

    def plain(self, name: str, precision: str, kind: str) -> dict[str, Any]:
        """Measure a loop: eager, benchmark (cuDNN's), graph (one for a step) or compiled."""
        x, y = (t.to(self.device) for t in self.samples(name, 1))
        x = x.to(memory_format=torch.channels_last)
        model = self.network(name).to(self.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        sgd = make_optimizer(model, OptimizerSettings(lr=0.01))
        run = torch.compile(model) if kind == "compiled" else model
        torch.backends.cudnn.benchmark = kind in ("benchmark", "graph")
        wide, dtype = precision == "float32", getattr(torch, precision)

        def step() -> None:
            half = (
                nullcontext() if wide else torch.autocast(self.device, dtype, cache_enabled=False)
            )
            with half:
                loss = nn.functional.cross_entropy(run(x), y)
            loss.backward()
            sgd.step()
            sgd.zero_grad(set_to_none=kind != "graph")

        once = self.recorded(step) if kind == "graph" else step
        count = 1 if self.quick else STEPS[name]
        rates = []
        for turn in range(TURNS + 1):
            self.wait()
            start = perf_counter()
            for _ in range(count):
                once()
            self.wait()
            if turn:
                rates.append(count * len(x) / (perf_counter() - start))
        torch.backends.cudnn.benchmark = False
        return {"images_per_second": round(median(rates)), "turns": [*map(round, rates)]}

    def recorded(self, step: Callable[[], None]) -> Callable[[], None]:
        """A whole step as one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(TURNS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def fit(self, name: str, solver: Solver, blocks: int, steps: int, **train: Any) -> Any:
        """Train; give the summary."""
        torch.manual_seed(0)
        wanted = {"epochs": 1, "batch_size": self.batch, "device": self.device, **train}
        settings = TrainSettings(report_every=10_000, **wanted)
        cut = split(self.network(name), blocks)
        return Trainer(cut, solver, train=settings, quiet=True).fit(self.samples(name, steps))

    def ours(self, name: str, solver: Solver, blocks: int, **train: Any) -> dict[str, Any]:
        """Measure a method without its first epoch, which warms up."""
        steps = 2 if self.quick else max(2, STEPS[name] // 2)
        first, more = (
            float(self.fit(name, solver, blocks, steps, epochs=n, **train)["train_seconds"])
            for n in (1, 3)
        )
        return {"images_per_second": round(2 * steps * self.batch / (more - first))}

    def rates(self) -> Iterator[tuple[str, Row]]:
        """Plain loops, and methods: eager, and with recorded passes."""
        kinds = ("eager", "benchmark", "graph", "compiled") if self.gpu else ("eager",)
        for name in self.names:
            for kind in kinds:
                yield f"{name}, plain loop, {kind}", partial(self.plain, name, "bfloat16", kind)
            yield f"{name}, plain loop, float32", partial(self.plain, name, "float32", "eager")
            for method, (solver, blocks) in METHODS.items():
                for how in (False, "graphs") if self.gpu else (False,):
                    row = f"{name}, {method}{', graphs' * bool(how)}"
                    measure = partial(self.ours, name, solver, blocks, precision="bfloat16")
                    yield row, partial(measure, compile=how)
            exact = partial(self.ours, name, Backprop(), 1)
            for flag in (False, True):
                row = f"{name}, backprop, float32{', deterministic' * flag}"
                yield row, partial(exact, deterministic=flag)

    def launches(self) -> Iterator[tuple[str, Row]]:
        """Launches and copies of a step, and the share of its time in which the card computes."""
        for method, (solver, blocks) in METHODS.items():
            for how in (False, "graphs") if self.gpu else (False,):
                count = partial(self.count, solver, blocks, compile=how, precision="bfloat16")
                yield f"resnet20, {method}{', graphs' * bool(how)}", count

    def count(self, solver: Solver, blocks: int, **train: Any) -> dict[str, Any]:
        """Count what more steps add."""
        few, many = (1, 2) if self.quick else (4, 12)
        self.fit("resnet20", solver, blocks, few, **train)
        (one, busy, wall), (more, busier, longer) = (
            self.profile(partial(self.fit, "resnet20", solver, blocks, n, **train))
            for n in (few, many)
        )
        steps = many - few
        return {
            "a_step": {k: round((more[k] - one[k]) / steps, 1) for k, _ in more.most_common(9)},
            "busy_ms_a_step": round((busier - busy) / steps, 2),
            "ms_a_step_profiled": round((longer - wall) / steps, 2),
        }

    def profile(self, run: Callable[[], Any]) -> tuple[Counter[str], float, float]:
        """Events by name, and milliseconds in which the card computes, and in all."""
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if self.gpu else ProfilerActivity.CPU
        with profile(activities=[kind]) as seen:
            start = perf_counter()
            run()
            self.wait()
            wall = 1e3 * (perf_counter() - start)
        names, spans = Counter[str](), []
        for event in seen.events() or ():
            if str(event.device_type).endswith("CUDA"):
                names["kernels and copies"] += 1
                spans.append((event.time_range.start, event.time_range.end))
            elif event.name.startswith(("cuda", "cuLaunch")):
                names[event.name] += 1
        busy = end = 0.0
        for first, last in sorted(spans):
            busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
        return names, busy / 1e3, wall

    def bits(self) -> Iterator[tuple[str, Row]]:
        """Digests of the weights of the same training, twice."""
        for precision in ("float32", "bfloat16"):
            for flag in ("false", "true"):
                for blocks in (1, 4):
                    words = (f"train.precision={precision}", f"train.deterministic={flag}")
                    row = f"{precision}, {blocks} blocks, deterministic={flag}"
                    yield row, partial(self.twice, blocks, words)

    def twice(self, blocks: int, settings: tuple[str, ...]) -> dict[str, Any]:
        """Train twice by the command."""
        digests = []
        limit = f"data.limit={self.batch * (2 if self.quick else 11)}"
        for _ in range(2):
            with tempfile.TemporaryDirectory() as made:
                run, file = Path(made, "run"), Path(made, "network.safetensors")
                words = ["--model", "resnet8" if self.quick else "resnet20", "--epochs", "1"]
                words += [
                    "--blocks",
                    str(blocks),
                    "--batch-size",
                    str(self.batch),
                    "--out",
                    str(run),
                ]
                words += ["--solver", "ddg", "--set", f"train.device={self.device}", "--set", limit]
                words += [word for each in settings for word in ("--set", each)]
                for command in (["train", *words], ["export", str(run), str(file)]):
                    hybrid = [sys.executable, "-m", "hybrid", *command]
                    subprocess.run(hybrid, check=True, stdout=subprocess.DEVNULL, timeout=120)
                digests.append(hashlib.sha256(file.read_bytes()).hexdigest()[:12])
        return {"digests": digests, "equal": len({*digests}) == 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("rates", "launches", "bits"))
    parser.add_argument("--models", default="resnet20,resnet50")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few steps of 8 images: a rehearsal")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_training: torch {torch.__version__} sees no GPU: take --device cpu")
    bench, begin = Bench(options), perf_counter()
    rows: Iterator[tuple[str, Row]] = getattr(bench, options.part)()
    for row, measure in rows:
        found: dict[str, Any] = {"left_out": "no time"}
        if bench.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if perf_counter() - begin < options.seconds:
            try:
                found = measure()
            except Exception as error:  # the other rows go on
                found = {"failed": " ".join(str(error).split())[:300]}
        if bench.gpu:
            found["peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
        line = json.dumps({"row": row, **found})
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
