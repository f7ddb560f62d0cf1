"""Networks as their users have them train as in a plain loop of torch, with the same bits."""

from functools import cache
from math import isfinite
from types import SimpleNamespace

import pytest
import rows
import torch
from networks import BATCH, EPOCHS, SMALL, ZOO
from problems import trained_by_hand
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from trainings import assert_same, digests, metrics_of, weights
from zoo_packages import installed

from hybrid.data.sampling import epoch_order
from hybrid.method import schedule
from hybrid.settings.config import ScheduleSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop
from hybrid.solvers.layers.bundle import call_network

BLOCKS = [4, pytest.param(1, marks=pytest.mark.slow)]
LARGE = [name for name in ZOO if name.startswith(("torchvision", "timm"))]
"""The first test of one takes 2 to 10 s: 12 steps and three traces. One is for every day."""

ON_RANKS = {
    "U-Net": {"solver": AugmentedLagrangian(beta=0.1), "window": 2, "sweeps": 2},
    "character Transformer": {"solver": DDG(micro_batches=2)},
    "two outputs": {"solver": Backprop()},
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in LARGE[:-1] else []) for name in ZOO
    ]
)
def name(request):
    if not installed(ZOO[request.param].needs):
        pytest.skip(f"{ZOO[request.param].needs} is not installed")
    return request.param


@cache
def by_hand(name):
    """A plain loop: the state dict, and what it measures."""
    torch.set_num_threads(1)
    network = ZOO[name]
    train, test = network.data().parted()
    model = network.make().to(memory_format=torch.channels_last)
    count = rows.TRAIN // BATCH
    rate = schedule.make_schedule(ScheduleSettings(), network.rate, count, EPOCHS)

    def steps():
        for step in range(EPOCHS * count):
            order = epoch_order(0, step // count, rows.TRAIN).split(BATCH)
            yield *batch(train, order[step % count]), rate(step)

    trained_by_hand(model, steps(), loss=network.loss or nn.functional.cross_entropy)
    return SimpleNamespace(weights=model.state_dict(), **measured(model, network, test))


def batch(data, ids):
    inputs, targets = tree_map(lambda x: x[ids], (data.inputs, data.targets))
    if isinstance(inputs, Tensor) and inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs, targets


def measured(model, network, data):
    """Loss and first metric in evaluation mode, accuracy where the network has none."""
    loss, found = network.loss or nn.functional.cross_entropy, {"loss": 0.0, "metric": 0.0}
    right = next(iter((network.metrics or {"": accuracy}).values()))
    with torch.no_grad():
        for ids in torch.arange(rows.TEST).split(BATCH):
            inputs, targets = batch(data, ids)
            out = call_network(model.eval(), inputs)
            found["loss"] += loss(out, targets).item() * len(ids) / rows.TEST
            if network.metrics or not network.loss:
                found["metric"] += right(out, targets).double().mean().item() * len(ids) / rows.TEST
    return found


def accuracy(out, targets):
    return out.argmax(1) == targets


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training on so many blocks: the weights, the summary and the run folder."""
    root = tmp_path_factory.mktemp("zoo")

    @cache
    def of(name, blocks):
        out = root / f"{name} {blocks}"
        trainer = ZOO[name].trainer(blocks, solver=Backprop(), out=out)
        summary = ZOO[name].fit(trainer)
        return SimpleNamespace(
            weights=trainer.blocks.model.state_dict(), summary=summary, out=out, blocks=blocks
        )

    return of


@pytest.mark.parametrize("blocks", BLOCKS)
def test_serial_training_equals_a_hand_written_loop(name, blocks, run):
    """In its weights, in what it measures, and in its checkpoint, a state dict of the module."""
    found, expected = run(name, blocks), by_hand(name)
    assert_same(found.weights, expected.weights)
    assert found.summary["test_loss"] == pytest.approx(expected.loss, rel=1e-9)
    metrics = list(metrics_of(found.summary).values()) or [0.0]
    assert metrics == pytest.approx([expected.metric], rel=1e-5)
    fresh = ZOO[name].make()
    fresh.load_state_dict(weights(found.out))
    assert_same(fresh.state_dict(), expected.weights)


def trained(name, out):
    """The checksum of every unit's weights and momenta, and the loss of the test."""
    summary = SMALL[name].fit(SMALL[name].trainer(2, out=out, **ON_RANKS[name]))
    return digests(out), summary["test_loss"]


@pytest.mark.parametrize("name", ON_RANKS)
def test_mpi_ranks_train_any_network_to_the_bits_of_threads(name, world, tmp_path):
    first, second = world.train(2, f"{__name__}:trained", name, tmp_path / "ranks")
    assert first == second == trained(name, tmp_path / "threads")
    assert isfinite(first[1])
