"""Plans for a device that this machine does not have, on clocks that count nothing of this one."""

import json

import pytest
import torch
from answers import assert_one_line, output, refusal
from torch import nn

from hybrid.bench.plan import planner as plan
from hybrid.bench.plan import standin
from hybrid.bench.plan.device import Device, Roofline
from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import BASE, Recipe
from hybrid.links import LinkSpeed, run_virtual
from hybrid.links.grid import Grid
from hybrid.networks.units import Unit
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.training import build

ROOF = {"flops_per_second": 1e9, "bytes_per_second": 1e9}
DEVICE = Device(roofline=Roofline(**ROOF))
SLOW = LinkSpeed(1e6, 1e-3)


def planner(network=SLOW, device=DEVICE, **settings):
    given = {"data.name": "digits", "data.limit": 64, "train.batch_size": 32, "train.threads": 1}
    resolved = load(None, {**given, **settings})
    images, _ = build.load_own(resolved.data)
    return Planner(resolved, build.build_model(resolved, images), images, network, device=device)


def test_a_roofline_takes_the_longer_of_computing_and_moving_and_an_overhead_for_each_operation():
    n, a, b = 6, 64, 128
    layer = nn.Linear(a, b, bias=False)
    chain = [Unit("layer", {"layer": layer})]
    x, flops, moved = torch.randn(1, a), 2 * n * a * b, 4 * (n * a + a * b + n * b)
    for roof, forward in (
        (Roofline(flops_per_second=1e6, bytes_per_second=1e15), flops / 1e6),
        (Roofline(flops_per_second=1e15, bytes_per_second=1e6), moved / 1e6),
        (Roofline(flops_per_second=1e15, bytes_per_second=1e15, seconds_per_operation=1.0), 1.0),
    ):
        ((cost,),) = Device(roofline=roof).passes(layer, chain, [x.expand(n, a)])
        assert cost.forward * n == pytest.approx(forward, rel=0.01)


EXACT = Recipe("exact", Backprop(micro_batches=2))
OF_ONE_BLOCK = [EXACT, Recipe("diloco", Backprop(), sync=DiLoCo(steps=2, lag=1))]
OF_TWO = [*OF_ONE_BLOCK, Recipe("ddg", DDG(2)), Recipe("sweeps", AugmentedLagrangian())]


@pytest.mark.parametrize(
    ("grid", "recipe"),
    [
        *((Grid(1, R), recipe) for R in (4, 16) for recipe in OF_ONE_BLOCK),
        *((Grid(2, 4), recipe) for recipe in OF_TWO),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_one_replica_stands_for_all(grid, recipe, monkeypatch):
    """All replicas on clocks of their own take as long; a message's place in a row is all between.

    Messages of a few peers go one by one, to all of them in the same order.
    """
    network = LinkSpeed(1e8, 1e-5)
    made = planner(network)
    blocks = made.blocks(grid.blocks, 8)
    one = made.predict(blocks, recipe, replicas=grid.replicas)

    def all_of_them(blocks, program, network, threads, *_):
        return run_virtual(blocks, program, network, threads, grid.replicas)[:blocks]

    monkeypatch.setattr(plan, "run_virtual", all_of_them)
    every = made.predict(blocks, recipe, replicas=grid.replicas)
    assert one.images_per_second == pytest.approx(every.images_per_second, rel=0.05)
    assert one.bytes_per_image == pytest.approx(every.bytes_per_image, rel=0.02)


def test_a_plan_for_a_device_counts_what_its_host_issues(monkeypatch):
    """Every operation takes a second, and nothing else takes any time."""
    roof = Roofline(flops_per_second=1e24, bytes_per_second=1e24, seconds_per_operation=1.0)
    made = planner(LinkSpeed(1e15, 0.0), Device(roofline=roof))
    whole = made.blocks(1, 32)
    step = 32 / made.predict(whole, BASE).images_per_second
    passes = 32 * sum(map(sum, made.timed.costs(whole, 32)))
    # an optimizer's operation for each tensor
    assert step - passes == pytest.approx(len([*made.model.parameters()]), abs=1e-6)
    seconds = []
    for operations in (0, 10):
        monkeypatch.setattr(standin, "MESSAGE_OPERATIONS", operations)
        seconds.append(32 / made.predict(made.blocks(2, 32), EXACT).images_per_second)
    # the first sends a part, the second receives and sends two, the first receives the last
    assert seconds[1] - seconds[0] == pytest.approx(6 * 10, abs=1e-6)


def test_a_device_of_little_memory_rules_out_what_does_not_fit():
    needs = planner().memory(planner().blocks(1, 32), BASE)[0] / 1e9
    found = planner(device=Device(roofline=DEVICE.roofline, memory_gb=0.9 * needs))
    made = list(found.predictions([Grid(1), Grid(4)], [4]))
    assert max(max(p.memory_bytes) for p in made) < 0.9 * needs * 1e9
    assert "backprop, m=1 on 1 block needs" in found.refused[0]
    tiny = planner(device=Device(roofline=DEVICE.roofline, memory_gb=1e-6))
    assert "the device has 1e-06" in refusal(next, tiny.predictions([Grid(2)], [4]))


WORDS = "plan --data digits --micro-batches 2 --batch-size 32 --set data.limit=64 --blocks 2"


def test_a_plan_for_a_device_measures_nothing(hybrid, tmp_path):
    profile = tmp_path / "device.toml"
    profile.write_text("roofline = {flops_per_second = 1e9, bytes_per_second = 1e9}\n")
    words = (*WORDS.split(), "--set", "train.threads=1", "--device", profile)
    first, second = (output(hybrid(*words)) for _ in range(2))
    assert first == second
    assert "| 1 x 2 | backprop, m=1 |" in first


@pytest.mark.parametrize(
    ("table", "said"),
    [
        *(({"roofline": {**ROOF, name: 5e-324}}, f"{name} is 5e-324") for name in ROOF),
        ({}, "roofline"),
        ({"roofline": {**ROOF, "flops": 1}}, "roofline.flops is 1; extra inputs"),
        ({"roofline": {**ROOF, "bytes_per_second": 0}}, "bytes_per_second is 0"),
    ],
)
def test_a_wrong_profile_gets_one_line(hybrid, tmp_path, table, said):
    profile = tmp_path / "device.toml"
    profile.write_text(
        "\n".join(f"{k} = {json.dumps(v).replace(':', ' =')}" for k, v in table.items())
    )
    assert_one_line(hybrid(*WORDS.split(), "--device", profile), str(profile), said)
