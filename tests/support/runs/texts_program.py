"""Trainings of a tiny language model on texts of several lengths, on threads or on MPI's ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from texts import LONGEST, collate, network, sentences
from torch import Tensor
from torch.utils.data import DataLoader
from trainings import trainer_of
from world import launched

from hybrid.solvers import Solver

KIND, BATCH = "BertForTokenClassification", 4
LENGTHS = [5 + (7 * i) % 20 for i in range(16)]
PADDED = partial(collate, length=LONGEST)


def prepared(
    solver: Solver,
    kind: str = KIND,
    *,
    make: Any = collate,
    lengths: Any = LENGTHS,
    batch_size: int = BATCH,
    **more: Any,
) -> tuple[Any, DataLoader[Any]]:
    """A trainer of a model cut in the middle, by plain SGD, and a loader of its texts."""
    items = sentences(kind, lengths)
    model = more.pop("model", None) or network(kind, more.pop("double", True))
    trainer = trainer_of(
        model,
        solver,
        cuts=more.pop("cuts", ["transformer.h.1" if "GPT2" in kind else "bert.encoder.layer.1"]),
        sample=make(items[:2]),
        train={"epochs": 1, "batch_size": batch_size, **more.pop("train", {})},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        schedule={"name": "constant", "warmup_steps": 0},
        **more,
    )
    return trainer, DataLoader(items, batch_size, shuffle=True, collate_fn=make)


def trained(solver: Solver, kind: str = KIND, **more: Any) -> dict[str, Tensor]:
    """The parameters after an epoch."""
    trainer, data = prepared(solver, kind, **more)
    trainer.fit(data, data)
    return {name: p.detach() for name, p in trainer.blocks.model.named_parameters()}


def on_ranks(comm: Any, solver: Solver, dropout: float) -> dict[str, Any]:
    """The same under a launcher; those of this rank's block."""
    with launched(comm):
        model = network(KIND, False, dropout)
        trainer, data = prepared(solver, model=model)
        trainer.fit(data, data)
        units = trainer.blocks.units_of(comm.rank)
        parameters = {name: p for unit in units for name, p in unit.parameters().items()}
        return {name: p.detach().numpy() for name, p in parameters.items()}
