"""The settings of a run that is resumed: its own, but for what no longer fits."""

from types import SimpleNamespace

import pytest

from hybrid.ranks import launch
from hybrid.settings.resolve import load, to_toml
from hybrid.training import run_settings

CUTS, WAITS = ["layer1.0"], [(4, 0), (0, 4)]
STORED = {
    "model.name": "resnet8",
    "data.name": "digits",
    "train.batch_size": 32,
    "solver.name": "ddg",
    "solver.micro_batches": 4,
    "fill.name": "penalty",
    "rounds.local_budget": WAITS,
    "split.cuts": CUTS,
    "split.blocks": 2,
    "split.replicas": 1,
}


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """The settings of a run of two blocks that is resumed on so many ranks; 0: on threads."""

    def read(ranks=0, file=None, elastic=False, **asked):
        stored = {**STORED, **asked.pop("stored", {})}
        (tmp_path / "config.toml").write_text(to_toml(load(None, stored)))
        path = tmp_path / "more.toml"
        path.write_text(file or "")
        comm = SimpleNamespace(size=ranks) if ranks else None
        monkeypatch.setattr(launch, "communicator", lambda: comm)
        given = {key.replace("__", "."): value for key, value in asked.items()}
        before = run_settings.read_toml(tmp_path / "config.toml")
        return run_settings.read_settings(path if file else None, given, before, elastic)

    return read


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [(1, 2, 0), (1, 2, 4), (2, 1, 2), (2, 1, 0), (1, 1, 2)],
)
def test_cuts_and_timetable_stay_with_the_number_of_blocks(before, after, ranks, resumed):
    config = resumed(ranks, split__replicas=after, stored={"split.replicas": before})
    assert (config.split.blocks, config.split.replicas) == (2, after)
    assert config.split.cuts == CUTS
    assert list(config.rounds.local_budget) == WAITS


def test_cuts_and_timetable_of_other_blocks_are_dropped(resumed):
    for found, grid in (
        (resumed(2, split__replicas=2), (1, 2)),
        (resumed(3), (3, 1)),
        (resumed(split__blocks=3), (3, 1)),
    ):
        assert (found.split.blocks, found.split.replicas) == grid
        assert (found.split.cuts, list(found.rounds.local_budget)) == ([], [])


def test_an_elastic_run_has_the_grid_that_was_asked_for_where_it_fits(resumed):
    stored = {"split.replicas": 2, "train.sync_batchnorm": True, "sync.name": "local-sgd"}
    asked = {"split__blocks": 2, "split__replicas": 2, "stored": stored}
    for ranks, grid in ((4, (2, 2)), (3, (3, 1)), (5, (5, 1))):
        found = resumed(ranks, elastic=True, **asked).split
        assert (found.blocks, found.replicas) == grid
        assert found.cuts == (CUTS if ranks == 4 else [])
    with pytest.raises(ValueError, match="3 ranks cannot form a grid of 2 blocks x 2 replicas"):
        resumed(3, **asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"fill__name": "none"},
        {"solver__micro_batches": 8},
        {"solver__micro_batches": 1},
        {"train__batch_size": 64},
        {"split__replicas": 4},
        {"split__cuts": ["layer2.0"]},
        {"solver__name": "backprop"},
        {"solver__name": "fdg"},
    ],
    ids=str,
)
def test_a_timetable_that_no_longer_fits_is_dropped_unless_it_is_asked_for(asked, resumed):
    assert not resumed(**asked).rounds.local_budget
    if asked.keys().isdisjoint({"fill__name", "solver__name"}):
        wanted = [(2, 2), (0, 2)]
        assert list(resumed(**asked, rounds__local_budget=wanted).rounds.local_budget) == wanted
        found = resumed(file="[rounds]\nlocal_budget = [[2, 2], [0, 2]]", **asked)
        assert list(found.rounds.local_budget) == wanted


@pytest.mark.parametrize("asked", [{"fill__name": "augmented-lagrangian"}, {"train__epochs": 9}])
def test_a_timetable_that_fits_stays(asked, resumed):
    assert list(resumed(**asked).rounds.local_budget) == WAITS
