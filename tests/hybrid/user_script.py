"""A user's script, strictly typed: the calls that the documentation shows, each in its forms.

A `type: ignore` stands where a call must be rejected, and mypy reports one that is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import hybrid
from hybrid import (
    Blocks,
    Callback,
    CheckpointSettings,
    DelaySettings,
    LinkSettings,
    OptimizerSettings,
    ScheduleSettings,
    Trainer,
    TrainSettings,
    data,
    models,
    split,
)
from hybrid.bench.show import describe, draw
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, BlockADMM, Penalty
from hybrid.solvers.acting import Positive
from hybrid.solvers.sync import DiLoCo, LocalSGD
from hybrid_samplers import SelectiveBackprop

SHORT = TrainSettings(epochs=1, batch_size=16, threads=1)


class Alarm(Callback):
    """Stops a run that has gone wrong."""

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool:
        return (results["loss"] or 0.0) > 100


@dataclass(frozen=True)
class Mine(Backprop):
    """A solver of one's own."""

    name: ClassVar[str] = "mine"

    scale: Positive = 1.0
    """A setting."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def rows() -> TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def cut() -> Blocks:
    return split(network(), 2, sample=torch.zeros(2, 4))


def mixup(inputs: Tensor, targets: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(inputs), generator=random)
    return (inputs + inputs[order]) / 2, targets


def decaying(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def right(output: Tensor, targets: Tensor) -> Tensor:
    return output.argmax(1) == targets


def settings_in_every_form(folder: Path) -> list[Trainer]:
    """Objects, dicts and names."""
    return [
        Trainer(cut()),
        Trainer(cut(), "backprop", train={"epochs": 1}, out=str(folder / "a")),
        Trainer(cut(), DDG(micro_batches=2), train=SHORT, out=folder / "b", resume=False),
        Trainer(cut(), FDG(), delay="extrapolate", optimizer="AdamW", schedule="cosine"),
        Trainer(cut(), FDG(), delay=DelaySettings(mend="extrapolate", cap=0.5)),
        Trainer(cut(), AugmentedLagrangian(beta=1e-3), Backprop(micro_batches=2), window=4),
        Trainer(cut(), Penalty(), window="all", sweeps=2, correct_every=1, memory_gb=1.0),
        Trainer(cut(), BlockADMM(), correct_every=0),
        Trainer(cut(), "ddg", fill="penalty", local_budget=[(2, 0), (0, 2)], serial_epochs=0.5),
        Trainer(cut(), "ddg", fill=Penalty(local_lr=0.2), serial_end=True),
        Trainer(cut(), Mine(scale=2.0), sampler="selective-backprop"),
        Trainer(cut(), sampler=SelectiveBackprop(beta=2.0), solver="backprop"),
        Trainer(cut(), Backprop(), replicas=2, sync="local-sgd"),
        Trainer(cut(), Backprop(), replicas=2, sync=LocalSGD(steps=4), side_by_side="peers"),
        Trainer(cut(), Backprop(), replicas=2, sync=DiLoCo(), links="virtual"),
        Trainer(cut(), links=LinkSettings(kind="virtual"), checkpoint={"keep_last": 1}),
        Trainer(cut(), links={"timeout": 60}, checkpoint=CheckpointSettings(best=True)),
        Trainer(cut(), optimizer=OptimizerSettings(name="muon"), schedule=ScheduleSettings()),
        Trainer(cut(), optimizer={"name": "RMSprop", "arguments": {"alpha": 0.95}}),
        Trainer(cut(), optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3)),
        Trainer(cut(), schedule={"name": "constant", "warmup_steps": 0}),
        Trainer(cut(), schedule=lambda step: 1e-3 / (1 + step) ** 0.5),
        Trainer(cut(), schedule=(decaying, "epoch")),
        Trainer(cut(), schedule=(lambda optimizer: LambdaLR(optimizer, float), "step")),
        Trainer(cut(), loss=nn.functional.cross_entropy, metrics={"right": right}),
        Trainer(cut(), loss=nn.CrossEntropyLoss(), denominator=lambda targets: len(targets)),
        Trainer(cut(), regularizer=lambda named: sum(w.abs().sum() for w in named.values())),
        Trainer(cut(), batch_transform=mixup, callbacks=[Alarm()], quiet=True),
    ]


def optimizers_of_a_loop() -> list[Trainer]:
    """Objects of torch's, and when the scheduler steps."""
    blocks = cut()
    optimizer = torch.optim.AdamW(blocks.model.parameters(), lr=1e-3)
    return [
        Trainer(blocks, "ddg", optimizer=optimizer),
        Trainer(blocks, optimizer=optimizer, schedule=(LambdaLR(optimizer, float), "step")),
        Trainer(blocks, optimizer=optimizer, schedule=(LambdaLR(optimizer, float), "epoch")),
        Trainer(blocks, optimizer=optimizer, schedule=ReduceLROnPlateau(optimizer)),
    ]


def trained(folder: Path) -> None:
    """A run, what it leaves, and what is read of it."""
    trainer = Trainer(cut(), Backprop(), train=SHORT, optimizer="SGD", out=folder, quiet=True)
    train = DataLoader(rows(), batch_size=16, shuffle=True)
    summary = trainer.fit(train, rows(), epochs=1)
    accuracy: float = summary["test_accuracy"]
    found: dict[str, float] = trainer.evaluate(rows())
    again = hybrid.load(str(folder), network)
    hybrid.export(folder, folder / "model.safetensors", best=False)
    assert accuracy == found["accuracy"]
    assert again(torch.zeros(1, 4)).shape == (1, 3)


def looked_at(folder: Path) -> None:
    """Networks, data, and how a network is cut."""
    with hybrid.without_weights():
        models.resnet(depth=8, classes=10)
    train, test = data.load("digits", limit=64)
    assert len(train) == 64
    assert len(test)
    data.Mapped(rows(), workers=0)
    data.Stream(rows(), samples=64)
    blocks = split(models.build("resnet8", classes=10, channels=1, image_size=8), cuts=["layer2.0"])
    named: list[str] = blocks.cuts
    shown = describe(blocks, torch.zeros(4, 1, 8, 8), batch_size=64)
    assert named == [each.before for each in shown.cuts] or shown.blocks
    draw(shown, folder / "blocks.svg")


def rejected() -> None:
    """What a type checker tells before a run does."""
    wrong: Any = None
    Trainer(wrong, solver=3)  # type: ignore[arg-type]
    Trainer(wrong, schedule=(decaying, 3))  # type: ignore[arg-type]
    Trainer(wrong, train="short")  # type: ignore[arg-type]
    Trainer(wrong, out=3)  # type: ignore[arg-type]
    Trainer(wrong, sync=Backprop())  # type: ignore[arg-type]
    Trainer(wrong, nothing=3)  # type: ignore[call-arg]
