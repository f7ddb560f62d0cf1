"""16 bits, graphs and kernels as settings of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid import Trainer, data, models, split
from hybrid.settings.config import TrainSettings
from solvers import AugmentedLagrangian, AuxNet, Solver

BATCH, EPOCHS = 64, 3


@pytest.fixture(scope="module")
def digits() -> tuple[data.Dataset, data.Dataset]:
    return data.load("digits")


def trainer(blocks: int, solver: Solver, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = models.build("resnet8", classes=10, channels=1, image_size=8)
    return Trainer(split(model, blocks), solver, quiet=True, **settings)


def test_bfloat16_trains(digits) -> None:
    settings = TrainSettings(epochs=EPOCHS, batch_size=BATCH, threads=1, precision="bfloat16")
    assert trainer(2, AugmentedLagrangian(), train=settings).fit(*digits)["test_accuracy"] > 0.7


@pytest.mark.parametrize("solver", [AugmentedLagrangian(), AuxNet(width=4)], ids=lambda s: s.name)
def test_float16_trains(digits, solver) -> None:
    settings = TrainSettings(epochs=EPOCHS, batch_size=BATCH, threads=1, precision="float16")
    assert trainer(2, solver, train=settings).fit(*digits)["test_accuracy"] > 0.7


def test_graphs_that_float16_cannot_have_are_refused(digits) -> None:
    settings = TrainSettings(precision="float16", graphs=True, batch_size=BATCH)
    with pytest.raises(ValueError, match="choose bfloat16, or"):
        trainer(2, AugmentedLagrangian(), train=settings).fit(*digits)


def test_the_summary_says_who_computed_and_why_there_are_no_graphs(digits) -> None:
    settings = TrainSettings(epochs=1, batch_size=BATCH, threads=1, graphs=True, device="cpu")
    summary = trainer(2, AugmentedLagrangian(), train=settings).fit(*digits)
    assert summary["kernels"] == "torch"
    assert summary["graphs"] == ["none: no GPU"] * 2
    assert summary["gpu_memory_bytes"] == [0, 0]


def test_gaps_in_float16_are_refused(digits) -> None:
    settings = TrainSettings(precision="float16", batch_size=BATCH, device="cpu")
    with pytest.raises(ValueError, match="choose bfloat16, or give a --window"):
        trainer(2, AugmentedLagrangian(), train=settings, fill=True).fit(*digits)


def test_kernels_that_cannot_be_had_are_one_line(digits) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    settings = TrainSettings(kernels="cupy", batch_size=BATCH)
    with pytest.raises(ValueError, match=r"kernels is 'cupy' .* no GPU .* auto or torch"):
        trainer(2, AugmentedLagrangian(), train=settings).fit(*digits)
