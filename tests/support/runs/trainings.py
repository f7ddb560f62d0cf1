"""Small trainings on a few digits, and what they leave."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from answers import refusal
from torch import Tensor, nn

from hybrid import Trainer, data, split
from hybrid.folder import checkpoint, traces
from hybrid.networks import models
from hybrid.networks.blocks import SAMPLES
from hybrid.settings.config import CheckpointSettings, TrainSettings
from hybrid.solvers import Backprop, Solver

BATCH = 32
Data = tuple[data.Dataset, data.Dataset]


@cache
def digits(batches: int = 0) -> Data:
    """So many mini-batches of digits, and 50 to test with; all of them for 0."""
    train, test = data.load("digits")
    return (train.take(BATCH * batches), test.take(50)) if batches else (train, test)


def metrics_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the test by their names, without its loss."""
    found = {k[len("test_") :]: v for k, v in summary.items() if k.startswith("test_")}
    return {name: value for name, value in found.items() if name != "loss" and value is not None}


def network(name: str = "resnet8") -> nn.Sequential:
    """A model by name; `plain` is a small one without convolutions or BatchNorm."""
    torch.manual_seed(0)
    if name == "plain":
        hidden = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
    return models.build(name, classes=10, channels=1, image_size=8)


def layer_wise(model: nn.Sequential) -> torch.optim.Optimizer:
    """AdamW whose rate falls by the layer, whose biases do not decay, and with other betas once."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    groups: list[dict[str, Any]] = []
    for depth, layer in enumerate(reversed(layers)):
        rate = 3e-3 * 0.7**depth
        groups.append({"params": [layer.weight], "lr": rate, "weight_decay": 0.1})
        groups.append({"params": [layer.bias], "lr": rate, "weight_decay": 0.0})
    groups[0]["betas"] = (0.8, 0.9)
    return torch.optim.AdamW(groups, lr=3e-3)


OFTEN = CheckpointSettings(keep_last=0, steps=1)
"""A checkpoint with every report."""


def trainer_of(
    model: nn.Module,
    solver: Solver | None = None,
    blocks: int | None = 1,
    *,
    cuts: Sequence[str] | None = None,
    sample: Any = None,
    inside: bool = False,
    train: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """Two epochs of a model on blocks of counted costs, or cut as `cuts` says.

    `train` and `settings` say what is other than usual.
    """
    solver = solver or Backprop()
    cut = split(model, None if cuts else blocks, cuts=cuts, sample=sample, inside=inside)
    wanted = {"epochs": 2, "batch_size": BATCH, "threads": 1, **(train or {})}
    settings = {"checkpoint": CheckpointSettings(keep_last=0), "quiet": True, **settings}
    return Trainer(cut, solver, train=TrainSettings(**wanted), **settings)


def trainer(solver: Solver, out: Path | None = None, blocks: int = 2, **settings: Any) -> Trainer:
    """`trainer_of` a model by name, on digits."""
    model, sample = network(settings.pop("model", "resnet8")), torch.zeros(SAMPLES, 1, 8, 8)
    return trainer_of(model, solver, blocks, sample=sample, out=out, **settings)


def trained_weights(made: Trainer, loaded: Any) -> dict[str, Tensor]:
    """The weights after training."""
    made.fit(*loaded)
    return dict(made.blocks.model.state_dict())


def newest(run: Path) -> Path:
    """The last checkpoint."""
    return checkpoint.complete(run / "checkpoints")[-1]


def weights(run: Path) -> dict[str, Tensor]:
    """Those of the last checkpoint."""
    return checkpoint.load_model(newest(run), checkpoint.read_manifest(newest(run)))


def spans(run: Path) -> Counter[str]:
    """Phases of the first block, from the trace."""
    events = traces.spans(run)
    names = ("serial", "observe", "propagate", "parallel")
    return Counter(e["name"] for e in events if e["pid"] == 0 and e["name"] in names)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of every file of the last checkpoint."""
    body = checkpoint.read_manifest(newest(run))
    return {name: entry["sha256"] for name, entry in (body["units"] | body["states"]).items()}


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def lines(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl, without what depends on the clock."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "idle")} for line in found]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def interrupted(run: Path, after: int) -> None:
    """Leave what a run killed after its checkpoint number `after` leaves; 0 is from its start."""
    for folder in checkpoint.complete(run / "checkpoints")[after + 1 :]:
        shutil.rmtree(folder)
    (run / "summary.json").unlink()


def stopped(run: Path, step: int) -> None:
    """Leave what a run killed just after its checkpoint of a step leaves."""
    steps = [int(folder.name) for folder in checkpoint.complete(run / "checkpoints")]
    interrupted(run, max(i for i, each in enumerate(steps) if each <= step))


def refused(made: Trainer, loaded: Data) -> str:
    """The one line of a run that cannot be."""
    return refusal(made.fit, *loaded)
