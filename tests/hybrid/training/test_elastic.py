"""Resuming on other blocks: what a solver keeps at a cut follows the cut."""

import shutil
from pathlib import Path

import pytest
from torch import Tensor
from trainings import digits, interrupted, network, newest, trainer

from hybrid import split
from hybrid.folder import checkpoint
from hybrid.solvers import BlockADMM
from hybrid.training.run import Run

CUTS = ["layer1.0", "layer2.0"]
OTHERS = [[], ["layer2.0"], [*CUTS, "layer3.0"]]


@pytest.fixture(scope="module")
def few():
    return digits(4)


def make(out, cuts, resume=False):
    solver = BlockADMM(rho=0.1, balance_ratio=1.01)
    made = trainer(solver, out, window="all", correct_every=0, resume=resume)
    made.blocks = split(network(), cuts=cuts) if cuts else split(network(), 1)
    return made


@pytest.fixture(scope="module")
def stopped(few, tmp_path_factory):
    """A run of three blocks after the first of two epochs."""
    run = tmp_path_factory.mktemp("elastic") / "run"
    make(run, CUTS).fit(*few)
    interrupted(run, after=1)
    return run


def carried(run, few, cuts, patch):
    """What the programs hold at each cut when a resumed run is about to go on."""
    held: dict[str, dict[str, Tensor]] = {}

    def look(self, notices):
        program = self.training.rounds.program
        held[self.training.files.before] = dict(program.state().cut)
        return {}

    with patch.context() as patched:
        patched.setattr(Run, "_train", look)
        make(run, cuts, resume=True).fit(*few)
    return held


@pytest.mark.parametrize("cuts", OTHERS, ids=lambda cuts: "+".join(cuts) or "one block")
def test_kept_variables_follow_their_cuts_to_any_number_of_blocks(
    cuts, stopped, few, tmp_path, monkeypatch
):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    manifest = checkpoint.read_manifest(newest(run))
    held = carried(run, few, cuts, monkeypatch)
    for cut in cuts:
        kept = checkpoint.load_state(newest(run), manifest, f"cut before {cut}")
        assert bool(kept) == (cut in CUTS)
        mine = {f"program/{name}": tensor for name, tensor in held[f"cut before {cut}"].items()}
        assert all(mine[name].equal(tensor) for name, tensor in kept.items())
    make(run, cuts, resume=True).fit(*few)
    ended = checkpoint.read_manifest(newest(run))
    assert ended["cuts"] == cuts
    assert sorted(n.split()[-1] for n in ended["states"] if n.startswith("cut")) == cuts
    assert ended["totals"][0]["images"] == 2 * len(few[0])
