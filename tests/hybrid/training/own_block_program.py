"""A rank's start as the command makes it, on a network that is far larger than its block."""

import hashlib
from pathlib import Path

import torch
from torch import nn
from world import launched

from hybrid.settings.resolve import load
from hybrid.training import build

WIDTH, LAYERS = 256, 8
SETTINGS = {
    "model.name": "tests.hybrid.training.own_block_program:network",
    "data.name": "tests.hybrid.training.own_block_program:data",
    "train.loss": "mse",
    "solver.name": "backprop",
    "train.epochs": 1,
    "train.batch_size": 4,
    "optimizer.lr": 1e-3,
    "train.threads": 1,
}


def network():
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in made:
        nn.init.kaiming_normal_(layer.weight)
    return made


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return (x, y), (x, y)


def digests(blocks, index):
    """Of a block's tensors, by their names in the network."""
    module = blocks.module(index)
    return {
        module.global_name(name): hashlib.sha256(x.detach().numpy().tobytes()).hexdigest()
        for name, x in module.state_dict().items()
    }


def trained(blocks):
    """Two steps in one process."""
    config = load(None, {**SETTINGS, "split.blocks": blocks, "split.replicas": 1})
    loaded = build.load_rank_data(config)
    made = build.build_trainer(config, loaded, Path("unused"), False)
    made.options.out = None
    made.fit(*loaded)
    return {k: v for index in range(blocks) for k, v in digests(made.blocks, index).items()}


def on_a_rank(comm):
    """(bytes of all parameters at hand, of the block's own, its digests after two steps)."""
    config = load(None, {**SETTINGS, "split.blocks": comm.size, "split.replicas": 1})
    with launched(comm):
        loaded = build.load_rank_data(config)
        division = comm.bcast(build.divide(config, loaded[0]) if comm.rank == 0 else None)
        made = build.build_trainer(config, loaded, Path("unused"), False, division)
        made.options.out = None
        made.fit(*loaded)
    storages = {p.untyped_storage().data_ptr(): p for p in made.blocks.model.parameters()}
    held = sum(p.untyped_storage().nbytes() for p in storages.values())
    own = sum(p.nbytes for p in made.blocks.module(comm.rank).parameters())
    return held, own, digests(made.blocks, comm.rank)
