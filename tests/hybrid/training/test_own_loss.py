"""A network that computes its loss itself trains as in a loop of its own, in any parts."""

from functools import partial

import pytest
import torch
from texts import LONGEST, collate, network, plain_loop, sentences
from torch.utils.data import DataLoader
from trainings import trainer_of
from zoo_packages import installed

from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")

KINDS = ("BertForTokenClassification", "BertForSequenceClassification", "GPT2LMHeadModel")
BATCH = 5
PARTS = ((1, 1), (3, 1), (2, 2))
"""Micro-batches and replicas; their shares of 5 samples are uneven."""
PADDED = partial(collate, length=LONGEST)


def made(kind, items, micro_batches=1, replicas=1, make=PADDED, model=None, **more):
    """A model, its trainer, and a loader of the items."""
    model = network(kind) if model is None else model
    trainer = trainer_of(
        model,
        more.pop("solver", None) or Backprop(micro_batches=micro_batches),
        cuts=["transformer.h.1" if "GPT2" in kind else "bert.encoder.layer.1"],
        sample=make(items[:2]),
        replicas=replicas,
        train={"epochs": 1, "batch_size": BATCH, **more.pop("train", {})},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        schedule={"name": "constant", "warmup_steps": 0},
        **more,
    )
    return model, trainer, DataLoader(items, BATCH, shuffle=True, collate_fn=make)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_gradient_of_the_undivided_mini_batch(kind):
    items = sentences(kind, [3, 9, 4, 2, 12, 5, 7, 2, 10, 6])
    batches = epoch_order(0, 0, len(items)).split(BATCH)
    expected = plain_loop(network(kind), items, batches, PADDED)
    start = network(kind).state_dict()
    wanted = torch.cat([(x - start[name]).flatten() for name, x in expected.items()])
    for micro_batches, replicas in PARTS:
        model, trainer, data = made(kind, items, micro_batches, replicas)
        summary = trainer.fit(data, data)
        found = model.state_dict()
        moved = torch.cat([(found[name] - start[name]).flatten() for name in expected])
        assert (moved - wanted).norm() <= 1e-12 * wanted.norm(), (micro_batches, replicas)
    assert list(summary["test_metrics"]) == (["accuracy"] if "Sequence" in kind else [])
    assert trainer.train.loss == "model"
