"""The best checkpoint is kept beside the newest ones."""

import json
import shutil

import pytest
from callback_program import STEPS, short, short_data

from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import best
from hybrid.settings.config import CheckpointSettings
from hybrid.settings.selection import Selection

BEST = CheckpointSettings(keep_last=1, best=True)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of three epochs that keeps everything."""
    run = tmp_path_factory.mktemp("runs") / "three"
    short([], run, epochs=3, blocks=1).fit(*short_data())
    return run


@pytest.fixture
def run(three, tmp_path):
    return shutil.copytree(three, tmp_path / "run")


def kept(run):
    """The steps of its checkpoints, in epochs."""
    return [int(folder.name) / STEPS for folder in checkpoint.complete(run / "checkpoints")]


def tell(run, epoch, **told):
    """Let the checkpoint of an epoch tell other things."""
    path = run / "checkpoints" / f"{epoch * STEPS:08d}" / "manifest.json"
    body = {**json.loads(path.read_text()), **told}
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": checkpoint.digest(body)}))


def best_epoch(run, selection=None):
    found = best(checkpoint.complete(run / "checkpoints"), selection or Selection())
    return None if found is None else int(found.name) // STEPS


def test_a_resumed_run_keeps_the_best_of_before_beside_the_newest(run):
    tell(run, 1, tested={"accuracy": 1.0})
    short([], run, epochs=5, blocks=1, resume=True, checkpoint=BEST).fit(*short_data())
    assert kept(run) == [1, 5]


def test_the_best_gives_way_to_a_better_one(run):
    for epoch in (1, 2, 3):
        tell(run, epoch, tested={"accuracy": 0.0})
    short([], run, epochs=4, blocks=1, resume=True, checkpoint=BEST).fit(*short_data())
    assert kept(run) == [4]


def test_a_checkpoint_whose_own_weights_were_not_tested_does_not_count(run):
    tell(run, 2, tested={"accuracy": 1.0}, tested_step=STEPS)
    tell(run, 1, tested={"accuracy": 0.9})
    assert best_epoch(run) == 1
    for epoch in (1, 2, 3):
        tell(run, epoch, tested_step=None)
    assert best_epoch(run) is None


def test_the_best_is_that_of_the_metric_and_of_the_newest_set(run):
    for epoch, (loss, f1) in enumerate([(3.0, 0.2), (1.0, 0.9), (2.0, float("nan"))], 1):
        tell(run, epoch, tested={"accuracy": epoch / 4, "loss": loss, "f1": f1})
    assert best_epoch(run) == 3
    assert best_epoch(run, Selection("loss")) == 2
    assert best_epoch(run, Selection("f1", "min")) == 1
    assert best_epoch(run, Selection("missing", "min")) is None
    tell(run, 1, tested={"accuracy": 0.1}, tested_on="validation")
    tell(run, 2, tested={"accuracy": 0.1}, tested_on="validation")
    tell(run, 3, tested_step=None)
    assert best_epoch(run) == 1, "the epochs that were validated"


def test_a_setting_that_keeps_nothing_more_is_refused():
    every = CheckpointSettings(keep_last=0, best=True)
    with pytest.raises(ValueError, match=r"checkpoint.best is True, .*keep_last is above 0"):
        short([], checkpoint=every).fit(*short_data())
