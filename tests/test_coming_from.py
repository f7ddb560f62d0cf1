"""Loops of neighbors and the same in blocks: what the page shows is what runs, and gives."""

import difflib
import os
import re
import runpy
from collections import UserDict
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_packages import installed, package

import hybrid
from hybrid import split

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
PAGE = (EXAMPLES.parent / "coming-from.md").read_text()
NEEDS = {
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "trainer": "accelerate",
    "pipelining": "transformers",
}
NEW_LINES = {"accelerate": 6, "fabric": 6, "trainer": 5}
"""At most so many are written anew, where the page promises it."""


def run(name: str, folder: Path) -> dict[str, Any]:
    """What an example defines, and what it has printed as "printed"."""
    package("transformers")
    folder.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(StringIO()) as printed:
            names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        os.chdir(before)
    return names | {"printed": printed.getvalue()}


def run_on_a_rank(name: str, folder: Path) -> None:
    """Run an example, whose modules cannot be sent."""
    run(name, folder)


def skip_without(name):
    for needed in {"transformers", NEEDS[name]}:
        if not installed(needed):
            pytest.skip(f"{needed} is not installed")


def code(name):
    """An example without its docstring."""
    return (EXAMPLES / f"{name}.py").read_text().split('"""\n', 2)[1].strip()


def changes(name):
    pair = (code(f"{name}_{side}").splitlines() for side in ("before", "after"))
    return "\n".join([*difflib.unified_diff(*pair, lineterm="", n=1)][2:])


@pytest.mark.parametrize("name", NEEDS)
def test_the_page_shows_what_changes(name):
    shown = re.search(rf"{name}_after\.py.*?\n```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert shown[1].strip() == re.sub(r"^@@.*\n", "", changes(name), flags=re.MULTILINE).strip()
    new = [line for line in changes(name).splitlines() if re.match(r"\+.", line)]
    assert len(new) <= NEW_LINES.get(name, 100)


@pytest.mark.parametrize("name", ["accelerate", pytest.param("fabric", marks=pytest.mark.slow)])
def test_a_loop_and_two_blocks_have_the_same_bits(name, tmp_path, monkeypatch):
    skip_without(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        theirs = run(f"{name}_before", tmp_path / "theirs")["model"].state_dict()
    finally:
        torch.set_num_threads(threads)
    made = run(f"{name}_after", tmp_path / "ours")
    assert "epoch 3/3" in made["printed"]
    ours = made["model"].state_dict()
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[key], x) for key, x in ours.items())


@pytest.mark.slow
def test_what_stands_for_a_pipeline_trains(tmp_path):
    skip_without("pipelining")
    printed = run("pipelining_after", tmp_path)["printed"]
    losses = [float(loss) for loss in re.findall(r"train loss (\S+)", printed)]
    assert losses[0] > 1.3 * losses[-1]


@pytest.mark.slow
def test_trainer_and_two_blocks_have_the_same_losses_and_weights(tmp_path):
    skip_without("trainer")
    theirs, ours = (
        run(f"trainer_{side}", tmp_path / side)["trainer"] for side in ("before", "after")
    )
    losses = [
        [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
        for each in (theirs, ours)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][0] > 1.1 * losses[0][-1]
    for name, weight in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], weight, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_the_script_runs_on_two_ranks_of_mpirun(world, tmp_path):
    skip_without("accelerate")
    world.train(2, f"{__name__}:run_on_a_rank", "accelerate_after", tmp_path)
    model = run("accelerate_after", tmp_path / "threads")["model"]
    ranks = hybrid.load(tmp_path / "runs" / "hybrid", type(model)(model.config)).state_dict()
    assert all(torch.equal(x, ranks[key]) for key, x in model.state_dict().items())


def test_a_sample_may_be_the_batch_of_a_tokenizer():
    batch, model = (
        torch.zeros(2, 4),
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))),
    )
    assert len(split(model, 2, sample=UserDict(input=batch))) == 2
