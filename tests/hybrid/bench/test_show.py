"""`hybrid show`: what is told of a network in blocks before anything is trained."""

from __future__ import annotations

import json
import sys
from math import prod

import pytest
import torch
from answers import assert_one_line, output, refusal
from torch import Tensor, nn

from hybrid import OptimizerSettings, models, split
from hybrid.bench.show import describe, draw
from hybrid.bench.show.description import MOST_ROWS
from hybrid.bench.show.fitting import parse_memory
from hybrid.bench.show.request import show
from hybrid.solvers.engine.schedule import Span, flushed, never_flushed, table

MODULE = """
from torch import nn
from small_networks import Masked

def masked():
    return Masked(20, 2)

def data():
    import torch
    ones = torch.ones(4, 6, dtype=torch.int64)
    rows = [({"tokens": ones[0], "mask": ones[0]}, 0)] * 4
    return rows, rows
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of a user's, shown_networks, in the current folder."""
    (tmp_path / "shown_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("shown_networks", None)


class Scaled(nn.Module):
    """Times a buffer, which the backward pass reads, however many samples there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(1000, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU())


def test_every_byte_of_a_small_network_is_counted():
    blocks = split(perceptron(), cuts=["2"])
    adam = OptimizerSettings(name="adamw")
    shown = describe(blocks, torch.randn(4, 8), batch_size=10, optimizer=adam)
    first, last = shown.blocks
    assert (first.parameters, last.parameters) == (8 * 16 + 16, 16 * 4 + 4)
    for block in (first, last):
        assert block.weight_bytes == block.gradient_bytes == 4 * block.parameters
        assert block.optimizer_bytes == 2 * block.weight_bytes  # two moments
    # a Linear keeps its input, a ReLU its output
    assert first.activation_bytes == 10 * 4 * (8 + 16)
    assert last.activation_bytes == 10 * 4 * (16 + 4)
    (cut,) = shown.cuts
    assert (cut.before, cut.sample_bytes, cut.batch_bytes) == ("2", 4 * 16, 10 * 4 * 16)
    assert [unit.inputs[0].shape for unit in shown.units] == [(8,), (16,), (16,), (4,)]
    for parts in (shown.units, shown.blocks):
        assert sum(part.share for part in parts) == pytest.approx(1)
    assert shown.imbalance == 2 * max(first.share, last.share)


def test_frozen_weights_have_no_gradient_and_buffers_are_counted_once():
    network = nn.Sequential(nn.Linear(16, 16), Scaled(), nn.Linear(16, 2))
    network[2].requires_grad_(False)
    shown = describe(split(network, 3, balance="even"), torch.randn(4, 16), batch_size=10)
    whole, scaled, frozen = shown.blocks
    assert whole.gradient_bytes == whole.optimizer_bytes == 4 * 16 * 17
    assert (frozen.gradient_bytes, frozen.optimizer_bytes) == (0, 0)
    assert frozen.weight_bytes == 4 * 17 * 2
    assert scaled.weight_bytes == 4 * 16 * 1000
    assert scaled.activation_bytes == 0


def test_a_network_that_was_described_is_what_it_was():
    network = models.resnet(depth=8, image_size=8)
    network.append(nn.Dropout(0.5)).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    generator = torch.get_rng_state()
    blocks = split(network[:], 2, sample=torch.randn(4, 3, 8, 8))
    describe(blocks, torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    torch.set_rng_state(generator)
    describe(blocks, torch.zeros(4, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), generator)
    after = network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(p.grad is None for p in network.parameters())
    assert all(module.training for module in network.modules())


def test_it_is_cut_as_a_training_would_cut_it(hybrid):
    shown = json.loads(output(hybrid("show", "resnet20", "--blocks", 4, "--json")))
    assert [cut["before"] for cut in shown["cuts"]] == split(models.resnet(), 4).cuts
    blocks, whole = split(models.resnet(), 4, inside=False), ("--set", "split.inside=false")
    shown = json.loads(output(hybrid("show", "resnet20", "--blocks", 4, "--json", *whole)))
    assert [cut["before"] for cut in shown["cuts"]] == blocks.cuts
    costs = [sum(cost) for cost in blocks.costs]
    shares = [unit["share"] for unit in shown["units"]]
    assert shares == pytest.approx([cost / sum(costs) for cost in costs])
    shapes = blocks.cut_shapes(torch.zeros(1, 3, 32, 32))
    assert [tuple(cut["tensors"][0]["shape"]) for cut in shown["cuts"]] == shapes
    assert [cut["batch_bytes"] for cut in shown["cuts"]] == [512 * prod(s) for s in shapes]
    assert shown["parameters"] == sum(block["parameters"] for block in shown["blocks"])


def test_the_bytes_of_a_cut_are_those_of_its_codecs(hybrid):
    codecs = "--set", "solver.messages=int8", "--set", "solver.adjoints=int4"
    said = output(hybrid("show", "resnet20", "--blocks", 2, "--json", *codecs))
    (cut,) = json.loads(said)["cuts"]
    numbers, channels = prod(cut["tensors"][0]["shape"]), cut["tensors"][0]["shape"][0]
    assert cut["batch_bytes"] == 128 * (numbers + 4 * channels)
    assert cut["back_bytes"] == 128 * numbers * (4 + 32 / 64) / 8


def test_several_inputs_are_named_and_travel_as_one(hybrid, own):
    words = ("show", "shown_networks:masked", "--cuts", "layers.1")
    text = output(hybrid(*words, "--inputs", "tokens=int64[6],mask=int64[6]"))
    assert "tokens int64[6], mask int64[6]" in text
    assert "--- cut 1: 6 x 16, int64[6], int64[6] (3 tensors), 432 B a sample" in text
    assert output(hybrid(*words, "--data", "shown_networks:data")) == text


def test_a_deep_network_is_folded_into_runs():
    deep = nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))) for _ in range(15)))
    shown = describe(split(deep, cuts=["4.5"]), torch.zeros(2, 2))
    rows = shown.rows()
    assert len(rows) <= MOST_ROWS
    names = [str(n) for n in range(15)]
    assert [row.name for row in rows] == [*names[:4], "4.0 to 4.4", "4.5 to 4.9", *names[5:]]
    assert [row.name for row in shown.rows(0)] == ["0.0 to 4.4", "4.5 to 14.9"]
    assert len(shown.rows(2)) == len(shown.units) == 150
    for depth in (None, 0, 2):
        assert sum(row.units for row in shown.rows(depth)) == 150
        assert sum(row.share for row in shown.rows(depth)) == pytest.approx(1)
        assert len(shown.text(depth).splitlines()) == len(shown.rows(depth)) + 15
    assert str(shown) == shown.text()


def test_a_picture_is_whole_or_not_there(tmp_path):
    shown = describe(split(perceptron(), 2, sample=torch.zeros(2, 8)), torch.zeros(2, 8))
    assert draw(shown, tmp_path / "new" / "a.PNG").read_bytes().startswith(b"\x89PNG")
    same = [draw(shown, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg")]
    assert same[0] == same[1]
    (tmp_path / "folder.svg").mkdir()
    assert "is a folder" in refusal(draw, shown, tmp_path / "folder.svg")
    assert "must end in .svg or .png" in refusal(draw, shown, tmp_path / "a.pdf")
    assert "must end in .svg or .png" in refusal(draw, shown, tmp_path / "a")


FORM = ("--inputs", "float32[3,8,8]")
MASKED = ("shown_networks:masked", "--inputs")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("restnet20",), "unknown model 'restnet20': try 'resnet20'"),
        (("shown_networks:masked",), "give --inputs 'float32[3,224,224]'"),
        (("resnet8", "--cuts", "layer2.1"), "no unit 'layer2.1' among the 5 units"),
        (("resnet8", "--cuts", "layer2.0", "--blocks", 3), "--cuts names 1, which make 2 blocks"),
        (("resnet8", "--cuts", "layer2.0", "--balance", "even"), "has no effect: leave it out"),
        (("resnet8", "--data", "digits", *FORM), "leave one out"),
        (("resnet8", "--data-dir", "."), "give that, too"),
        (("resnet8", "--inputs", "int64[3,8,8]"), "resnet8 takes images"),
        (("gpt-2-64", "--inputs", "float32[3,8,8]"), "gpt-2-64 takes texts"),
        (("resnet8", "--picture", "."), "is a folder"),
        (("resnet8", "--picture", "a.jpg"), "must end in .svg or .png"),
        ((*MASKED, "tokens=int64[6"), "is no form of a sample"),
        ((*MASKED, "a=int64[6],a=int64[6]"), "names an input twice"),
        ((*MASKED, "a=int64[6],int64[6]"), "name all or none"),
        ((*MASKED, "int46[6]"), "did you mean 'int64'?"),
        ((*MASKED, "float32[99999999,9999999]"), "no such samples"),
        ((*MASKED, "tokens=int64[6],masc=int64[6]"), "unexpected keyword argument 'masc'"),
    ],
)
def test_what_cannot_be_shown_is_one_line(hybrid, own, asked, reason):
    assert_one_line(hybrid("show", *asked), reason)
    assert [path.name for path in own.iterdir() if path.suffix == ".jpg"] == []


@pytest.mark.parametrize("solver", ["ddg", "backprop"])
def test_a_schedule_is_the_one_that_blocks_go_through(hybrid, solver):
    words = ["--blocks", 3, "--solver", solver, "--set", "solver.micro_batches=4"]
    said, span = output(hybrid("show", "resnet20", "--schedule", *words)), Span.of([4, 4])
    late = solver == "ddg"
    lists = [never_flushed(2 - k, span) if late else flushed(k, 3, span) for k in range(3)]
    assert said.rstrip().endswith(table(lists))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "--solver", "penalty"], "'penalty', which has no schedule of passes"),
        (["--schedule", "--depth", "1"], "--depth has no effect with --schedule"),
        (["--solver", "ddg"], "--solver has no effect without --schedule"),
        (
            ["--schedule", "--set", "rounds.local_budget=[[1,0],[0,1]]"],
            "only with a method for local",
        ),
    ],
)
def test_what_a_schedule_cannot_show_is_said(hybrid, words, said):
    assert_one_line(hybrid("show", "resnet20", *words), said)


@pytest.mark.parametrize("memory", ["24", "24gb", "0GB", "-1GB", "GiB", "1e3GB", "24 TB"])
def test_a_memory_that_is_no_size_is_refused(memory):
    said = refusal(show, {"model.name": "resnet8"}, None, memory)
    assert f"--memory is {memory!r}" in said


def test_sizes_of_memory_have_two_units():
    assert (parse_memory("24GB"), parse_memory("1.5 GiB")) == (24 * 10**9, 3 * 2**29)


def test_what_fits_is_told_by_purpose_with_the_fewest_blocks_and_what_would_save_memory():
    settings = {"model.name": "resnet8", "train.batch_size": 16, "optimizer.name": "adamw"}
    fit = show({**settings, "split.blocks": 2}, None, "100GB").fit
    weights = sum(p.nbytes for p in models.build("resnet8", 10, 3, 32).parameters())
    assert sum(parts["gradients"] for parts in fit.blocks) == weights
    assert sum(parts["moments"] for parts in fit.blocks) == 2 * weights
    # a delay of one mini-batch on the first block: one older version there
    assert [parts["kept"] for parts in fit.blocks] == [fit.blocks[0]["gradients"], 0]
    assert fit.fewest_blocks == 1
    assert fit.changes["--set solver.stash=false"] == fit.blocks[0]["kept"]
    assert fit.changes["--set solver.recompute=true"] > 0
    assert "it fits into 100 GB a machine" in str(fit)


def test_what_has_no_room_is_told():
    fit = show({"model.name": "resnet8", "train.batch_size": 16}, None, "0.001GB").fit
    assert fit.fewest_blocks is None
    assert "it does not fit into 1 MB a machine; no number of blocks does" in str(fit)
