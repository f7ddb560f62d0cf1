"""A training with the objects of a plain loop, on threads or as every rank of an mpirun runs it."""

from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler
from trainings import digits, layer_wise, network, trainer_of
from world import launched

from hybrid.solvers import Backprop


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Six steps, with a rate of its own for each group; it moves momenta, too."""
    peaks = [0.01 * (i + 1) for i in range(len(optimizer.param_groups))]
    return lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=6)


def trained(out: Path) -> None:
    """Two blocks of two replicas, of which the first is frozen for an epoch."""
    model = network("plain")
    optimizer = layer_wise(model)
    made = trainer_of(
        *(model, Backprop(), 2),
        sample=torch.zeros(4, 1, 8, 8),
        optimizer=optimizer,
        schedule=one_cycle(optimizer),
        train={"frozen": {"1": 1}},
        replicas=2,
        out=out,
    )
    made.fit(*digits(3))


def on_ranks(comm: Any, out: Path) -> None:
    """The same under a launcher."""
    with launched(comm):
        trained(out)
