"""One bench on two ranks, from the command to the files."""

import json

import pytest
import torch
from answers import assert_one_line, output
from torch.nn.functional import cross_entropy

from hybrid.bench.contenders import PlainLoop, prepared
from tests.hybrid.bench.baselines_program import SETTINGS, batches, network


@pytest.fixture(scope="module")
def report(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "report"
    answer = world.hybrid(
        *(2, "bench", "--model", "resnet8", "--data", "digits"),
        *("--micro-batches", "2", "--rows", "backprop,Augmented", "--turns", "2"),
        *("--steps", "1", "--batch-size", "32", "--set", "data.limit=96", "--out", out),
    )
    return out, output(answer)


NAMES = [
    "plain loop",
    "plain loop, accumulating over 2",
    "backprop, m=1",
    "backprop, m=2",
    "backprop, m=2, bfloat16 messages",
    "augmented-lagrangian, m=2, window 4",
    "backprop, m=1, 2 replicas, all-reduce",
]


def test_every_row_is_measured_in_every_turn_the_base_case_first(report):
    out, printed = report
    assert (out / "bench.md").read_text() in printed
    raw = json.loads((out / "bench.json").read_text())
    assert [speed["name"] for speed in raw["speeds"]] == NAMES
    assert all(len(speed["images_per_second"]) == 2 for speed in raw["speeds"])
    assert all(rate > 0 for speed in raw["speeds"] for rate in speed["images_per_second"])
    assert raw["ranks"] == 2
    assert raw["machine"]["torch"]
    sent = {speed["name"]: speed["bytes_per_image"] for speed in raw["speeds"]}
    assert sent["plain loop"] == 0
    assert sent["backprop, m=2"] == 2 * sent["backprop, m=2, bfloat16 messages"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--micro-batches", "4,none"], "--micro-batches is '4,none'"),
        (["--set", "train.epoch=3"], "did you mean 'train.epochs'"),
        (["--rows", "pipedream"], "there are: plain loop; plain loop, "),
    ],
)
def test_wrong_use_gets_one_line(world, arguments, reason):
    assert_one_line(world.hybrid(2, "bench", "--model", "resnet8", *arguments), reason)


@pytest.mark.parametrize(
    "setting",
    [
        *("train.loss=mse", "rounds.window=8", "links.kind=virtual", "sampler.name=auto-assist"),
        *("train.epochs=77", "checkpoint.every=5", "optimizer.lr=0.2", "schedule.name=step"),
    ],
)
def test_what_no_row_would_heed_is_refused(world, setting):
    said = f"{setting.partition('=')[0]} is"
    assert_one_line(world.hybrid(2, "bench", "--set", setting), said, "leave ")


def test_on_torchruns_links_a_row_that_cannot_be_is_left_out_and_the_others_go_on(world, tmp_path):
    words = (
        *("bench", "--model", "resnet8", "--data", "digits", "--micro-batches", "2,64"),
        *("--rows", "ddg", "--turns", "1", "--steps", "1", "--batch-size", "32"),
        *("--set", "data.limit=96", "--out", str(tmp_path / "report")),
        *("--set", "train.precision=bfloat16"),
    )
    printed = output(world.run(2, "tests.hybrid.links.torch_program:hybrid", words)[0])
    assert "2 ranks joined by torch on 1 host(s)" in printed
    raw = json.loads((tmp_path / "report/bench.json").read_text())
    loops = ["plain loop", "plain loop, accumulating over 2"]
    assert [speed["name"] for speed in raw["speeds"]] == [
        *loops,
        "ddg, m=2",
    ]
    assert raw["precision"] == "bfloat16"
    assert raw["left_out"]["ddg, m=64"] == "a mini-batch has 32 samples"


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_plain_loop_computes_in_the_number_format_of_the_methods(precision):
    row, (batch,) = PlainLoop(network(), SETTINGS, precision=precision), batches(1)
    model = prepared(network())
    scale = 2.0**16 if precision is torch.float16 else 1.0  # GradScaler's first
    with torch.autocast("cpu", precision):
        loss = cross_entropy(model(batch.images()).float(), batch.labels())
    (scale * loss).backward()
    before = dict(model.named_parameters())
    row.train([batch])
    assert (SETTINGS.momentum, SETTINGS.nesterov) == (0.9, True)
    for name, p in row.model.named_parameters():
        # a first step of Nesterov's momentum 0.9 goes 1.9 times as far
        w = before[name]
        g = w.grad / scale + (w.ndim > 1) * SETTINGS.weight_decay * w
        expected = w - 1.9 * batch.learning_rate * g
        torch.testing.assert_close(p, expected, rtol=1e-3, atol=1e-5)


def test_without_ranks_it_says_how_to_start(hybrid):
    assert_one_line(hybrid("bench"), "mpirun -n 2 hybrid bench")
