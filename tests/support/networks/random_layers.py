"""A small chain whose units draw random numbers, trained by many methods."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import Trainer, data, split
from hybrid.folder import checkpoint
from hybrid.settings.config import CheckpointSettings, LinkSettings, TrainSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, FeaturesReplay, LocalUpdates, Petra
from hybrid.solvers.layers.branches import Reversible
from hybrid_messages import PDASGD

METHODS: dict[str, dict[str, Any]] = {
    "backprop": {"solver": Backprop(micro_batches=1)},
    "backprop, in parts and again": {"solver": Backprop(micro_batches=2, recompute=True)},
    "ddg": {"solver": DDG()},
    "ddg, again": {"solver": DDG(recompute=True)},
    "features-replay": {"solver": FeaturesReplay()},
    "petra": {"solver": Petra()},
    "pd-asgd": {"solver": PDASGD(micro_batches=2)},
    "local-updates": {"solver": LocalUpdates(head="user_heads:drawing")},
    "window": {"solver": AugmentedLagrangian(beta=0.1), "window": 2, "sweeps": 3},
    "waits": {
        "solver": DDG(micro_batches=2),
        "fill": AugmentedLagrangian(storage="bfloat16"),
        "local_budget": [(3, 0), (0, 4)],
    },
}


class DropPath(nn.Module):
    """x + F(x) for a random half of the samples, x for the others."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.branch(x)
        return x + self.branch(x) * (torch.rand(len(x), 1, 1, 1) < 0.5)


def branch(width: int) -> nn.Module:
    norm = nn.BatchNorm2d(width)
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), norm, nn.Dropout(0.3))


def trainer(method: dict[str, Any], out: Path, kind: str, resume: bool, steps: int) -> Trainer:
    """Twelve steps on two blocks, each of which draws."""
    torch.manual_seed(0)
    units = [nn.Conv2d(1, 8, 3, padding=1), Reversible(branch(4)), DropPath(branch(8))]
    head = [nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return Trainer(
        split(nn.Sequential(*units, DropPath(branch(8)), *head), cuts=["3"]),
        train=TrainSettings(epochs=1, batch_size=8, threads=1, report_every=1),
        checkpoint=CheckpointSettings(steps=steps, keep_last=0),
        links=LinkSettings(kind=kind),
        out=out,
        resume=resume,
        quiet=True,
        **method,
    )


def trained(
    method: dict[str, Any],
    out: Path,
    kind: str = "auto",
    resume: bool = False,
    steps: int = 1,
) -> dict[str, str]:
    """The checksum of every unit's weights and momenta after training."""
    made = trainer(method, out, kind, resume, steps)
    made.fit(*data.load("digits", limit=96))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.blocks.model.modules())
    manifest = checkpoint.read_manifest(checkpoint.complete(out / "checkpoints")[-1])
    assert manifest["step"] == 12
    return {unit: entry["sha256"] for unit, entry in manifest["units"].items()}
