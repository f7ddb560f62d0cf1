"""Texts of other lengths in every mini-batch train as in a plain loop, bit for bit."""

import pytest
import torch
from answers import refusal
from texts import collate, network, plain_loop, sentences
from torch.utils.data import DataLoader
from trainings import assert_same, trainer_of
from zoo_packages import installed

from hybrid.data.sampling import epoch_order
from hybrid.solvers import DDG, Backprop

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")

KIND, BATCH = "BertForTokenClassification", 4
LENGTHS = [5 + (7 * i) % 20 for i in range(24)]


def trained(solver, make=collate, lengths=LENGTHS, **more):
    items = sentences(KIND, lengths)
    model = network(KIND, False)
    trainer = trainer_of(
        model,
        solver,
        cuts=["bert.encoder.layer.1"],
        sample=make(items[:2]),
        train={"epochs": 1, "batch_size": BATCH, **more.pop("train", {})},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        schedule={"name": "constant", "warmup_steps": 0},
        **more,
    )
    data = DataLoader(items, BATCH, shuffle=True, collate_fn=make)
    summary = trainer.fit(data, data)
    return {name: p.detach() for name, p in model.named_parameters()}, summary


def test_backprop_is_the_plain_loop():
    batches = epoch_order(0, 0, len(LENGTHS)).split(BATCH)
    items = sentences(KIND, LENGTHS)
    assert len({max(LENGTHS[i] for i in ids) for ids in batches}) > 3
    expected = plain_loop(network(KIND, False), items, batches)
    assert_same(trained(Backprop())[0], expected)
