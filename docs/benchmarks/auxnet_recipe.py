"""AuxNet's recipe: a search on ResNet-8, what it is worth on ResNet-20, and its memory.

    python docs/benchmarks/auxnet_recipe.py search --data-dir ~/data
    python docs/benchmarks/auxnet_recipe.py final --data-dir ~/data
    python docs/benchmarks/auxnet_recipe.py scale --data-dir ~/data
    python docs/benchmarks/auxnet_recipe.py memory

Two blocks of equal counted operations, batch 128, lr 0.1 with a warm-up of one epoch and a linear
fall, bfloat16 autocast, one thread, one seed unless --seeds says more; alone but for "corrected".

    search   ResNet-8, CIFAR-10's first 5,000 images, 4 epochs; accuracy is that of 2,000 training
             images that no run sees (45,000 to 47,000)
    final    ResNet-20, the first 10,000, 2 epochs; accuracy is that of the first 5,000 test images

    scale    root mean squares of x_0 and p_1 of ResNet-8 before training, a mini-batch
    memory   counted, not measured

What is already in auxnet_recipe.json is not repeated.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hybrid import Trainer, data, models, split
from hybrid.data import Dataset
from hybrid.bench.plan.memory import saved_bytes
from hybrid.settings.config import LinkSettings, OptimizerSettings, TrainSettings
from hybrid.solvers import AugmentedLagrangian, AuxNet, Backprop, Setup, Solver
from hybrid.solvers.layers.auxiliary import auxiliary_network

FILE = Path(__file__).with_suffix(".json")
ALONE: dict[str, Any] = {"window": 4, "correct_every": 0}
HYBRID: dict[str, Any] = {"window": 4}
Trials = dict[str, tuple[Solver, dict[str, Any]]]


def alone(**settings: Any) -> tuple[Solver, dict[str, Any]]:
    """Without corrections, which leaves all of the training to the solver's steps."""
    return AuxNet(**({"local_lr": 1.0} | settings)), ALONE


def hybrid(**settings: Any) -> tuple[Solver, dict[str, Any]]:
    return AuxNet(**settings), HYBRID


BASE: dict[str, Any] = {
    "beta": 5e-4,
    "lam_step": 0.1,
    "multiplier": "none",
    "width": 16,
    "depth": 1,
}
ADJOINT = BASE | {"multiplier": "adjoint"}
DEEPER: dict[str, Any] = {"width": 32, "depth": 3, "aux_lr": 3e-3}
SEARCH: Trials = {
    "backprop": (Backprop(), {}),
    "base": alone(**BASE),
    "local_lr 0.1": alone(**BASE | {"local_lr": 0.1}),
    "beta 5e-3": alone(**BASE | {"beta": 5e-3}),
    "lam_step 1, beta 5e-3": alone(**BASE | {"lam_step": 1.0, "beta": 5e-3}),
    "lam_step 1": alone(**BASE | {"lam_step": 1.0}),
    "adjoint, lam_step 1": alone(**ADJOINT | {"lam_step": 1.0}),
    "adjoint, lam_step 1, beta 1e-4": alone(**ADJOINT | {"lam_step": 1.0, "beta": 1e-4}),
    "adjoint, width 32, depth 3, aux_lr 3e-3": alone(**ADJOINT | DEEPER),
}
FINAL: Trials = {
    "lam_step 1": alone(**BASE | {"lam_step": 1.0}),
    "adjoint, lam_step 1": alone(**ADJOINT | {"lam_step": 1.0}),
    "backprop": (Backprop(), {}),
    "adjoint, lam_step 1, corrected": hybrid(**ADJOINT | {"lam_step": 1.0, "local_lr": 0.1}),
}


def trained(
    model: str, trial: tuple[Solver, dict[str, Any]], sets: tuple[Any, Any], epochs: int, seed: int
) -> Any:
    """Test accuracy; loss and relative residual of the last epoch's parallel phase."""
    solver, rounds = trial
    torch.manual_seed(seed)
    network = models.build(model, 10, channels=3, image_size=32)
    blocks = split(network, 1 if solver.exact else 2, balance="operations")
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            blocks,
            solver,
            quiet=True,
            out=Path(folder) / "run",
            train=TrainSettings(
                threads=1, seed=seed, evaluate_every=1000, report_every=40, precision="bfloat16"
            ),
            optimizer=OptimizerSettings(lr=0.1),
            links=LinkSettings(kind="virtual"),
            **rounds,
        )
        summary = trainer.fit(*sets, epochs=epochs)
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    found = {"accuracy": round(summary["test_accuracy"], 4)}
    for line in lines:
        if line["phase"] == "parallel":
            found |= {"loss": round(line["loss"], 3), "residual": round(line["residual"][0], 3)}
    return found


def scale(train: Dataset) -> None:
    torch.manual_seed(0)
    blocks = split(models.build("resnet8", 10, channels=3, image_size=32), 2, balance="operations")
    ids = torch.arange(128)
    x = blocks.module(0)(train.batch(ids, 0, 0, True)).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(blocks.module(1)(x), train.labels[ids])
    (p,) = torch.autograd.grad(len(ids) * loss, x)
    print(
        *(
            f"{name} {v.detach().square().mean().sqrt().item():.1e}"
            for name, v in (("x", x), ("p", p))
        )
    )


def memory() -> None:
    """What the ranks keep beside their blocks, K = 2; of a_k: weights, gradients, Adam, graph."""
    sample = torch.zeros(2, 3, 32, 32)
    blocks = split(models.build("resnet20", 10, channels=3, image_size=32), 2, balance="operations")
    (cut,) = blocks.cut_shapes(sample)
    print(f"cut {cut}\n\n| | rank 0, MB | rank 1, MB |\n|---|---|---|")
    for sweeps in (1, 2):
        for window in (4, 16, 64, 390):
            setup = Setup((cut,), 128, window, sweeps)
            stored = [AugmentedLagrangian().memory(setup, k) / 1e6 for k in range(2)]
            name = f"augmented-lagrangian, sweeps {sweeps}, window {window}"
            print(f"| {name} | {stored[0]:.1f} | {stored[1]:.1f} |")
    for width, depth in ((16, 1), (32, 3), (64, 3)):
        network = auxiliary_network((3, 32, 32), cut, width, depth, seed=1)
        values = sum(p.numel() for p in network.parameters())
        graph = 64 * saved_bytes(network, sample)
        kept = f"{16 * values / 1e6:.2f} + {graph / 1e6:.1f}"
        print(f"| auxnet, width {width}, depth {depth}, any window | 0 | {kept} |")


def fit_all(
    part: str, trials: Trials, model: str, sets: tuple[Any, Any], epochs: int, seeds: list[int]
) -> None:
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    for seed in seeds:
        for name, trial in trials.items():
            done = rows.setdefault(part, {}).setdefault(name, {})
            if str(seed) not in done:
                done[str(seed)] = trained(model, trial, sets, epochs, seed)
                print(part, name, seed, done[str(seed)], flush=True)
                FILE.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["search", "final", "scale", "memory"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "memory":
        memory()
        return
    whole, test = data.load("cifar10", options.data_dir)
    if options.part == "scale":
        scale(whole)
        return
    trials = SEARCH if options.part == "search" else FINAL
    trials = {k: v for k, v in trials.items() if not options.only or k in options.only}
    if options.part == "search":
        unseen = replace(whole, images=whole.images[45000:47000], labels=whole.labels[45000:47000])
        fit_all("search", trials, "resnet8", (whole.take(5000), unseen), 4, options.seeds)
    else:
        fit_all("final", trials, "resnet20", (whole.take(10000), test.take(5000)), 2, options.seeds)


if __name__ == "__main__":
    main()
