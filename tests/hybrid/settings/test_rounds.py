"""A method's rounds: as asked, else as it wants; what cannot act is refused."""

import pytest
from answers import refusal

from hybrid.settings.config import RoundSettings
from hybrid.settings.resolve import load, resolve, to_toml
from hybrid.solvers import registry
from hybrid.training.build import build_options

CLASSES = {name: registry.solver_class(name) for name in registry.names()}
EXACT = [name for name, method in CLASSES.items() if method.exact]
ALONE = [name for name, m in CLASSES.items() if not m.alternates and not m.exact]
SWEEPING = [name for name, m in CLASSES.items() if m.alternates]


def rounds(solver, **asked):
    return build_options(resolve({"solver": {"name": solver}, "rounds": asked})).rounds


@pytest.mark.parametrize(
    ("solvers", "wanted"),
    [
        (EXACT, RoundSettings()),
        (ALONE, RoundSettings(correct_every=0)),
        (SWEEPING, RoundSettings(window=4, sweeps=1, correct_every=1)),
    ],
    ids=("exact", "alone", "sweeping"),
)
def test_unless_told_otherwise_a_method_does_as_it_wants(solvers, wanted):
    assert solvers
    for solver in solvers:
        sweeps = wanted.sweeps and registry.solver_class(solver).sweeps
        assert rounds(solver) == wanted.model_copy(update={"sweeps": sweeps}), solver


@pytest.mark.parametrize(
    ("solver", "asked", "decided"),
    [
        ("penalty", {"window": 8}, {"sweeps": 1, "correct_every": 1}),
        ("penalty", {"sweeps": 2}, {"window": 4, "correct_every": 1}),
        ("penalty", {"correct_every": 0}, {"window": 4, "sweeps": 1}),
        ("ddg", {"correct_every": 8}, {"window": 4}),
        ("ddg", {"serial_end": True}, {"window": 4, "correct_every": 0}),
    ],
    ids=str,
)
def test_rounds_that_are_asked_for_are_as_asked(solver, asked, decided):
    assert rounds(solver, **asked) == RoundSettings(**{**asked, **decided})


@pytest.mark.parametrize("solver", registry.names())
def test_what_is_decided_stays_as_it_is(solver):
    once = rounds(solver)
    asked = {k: v for k, v in once.model_dump().items() if v is not None}
    assert rounds(solver, **asked) == once


@pytest.mark.parametrize(
    ("solvers", "asked", "said"),
    [
        (EXACT, {"window": 4}, "rounds.window is 4, which has an effect only where "),
        (EXACT, {"correct_every": 1}, "rounds.correct_every is 1, which has an effect only where "),
        (ALONE, {"correct_every": 1}, "rounds.correct_every is 1, which works only where it is 0"),
        (ALONE, {"sweeps": 1}, "rounds.sweeps is 1, which has an effect only where "),
        (ALONE, {"window": 4}, "rounds.window is 4, which has an effect only where "),
        (EXACT, {"serial_end": True}, "rounds.serial_end is True, which has an effect only where "),
    ],
    ids=str,
)
def test_what_cannot_act_is_refused_in_one_line(solvers, asked, said):
    for solver in solvers:
        assert refusal(rounds, solver, **asked).startswith(said), solver


def test_a_run_that_names_no_method_has_the_default_or_the_one_for_windows():
    assert resolve({}) == resolve({"solver": {"name": registry.DEFAULT}, "fill": {"name": "none"}})
    for fill in ("none", "penalty"):
        assert resolve({"fill": {"name": fill}}).solver["name"] == registry.DEFAULT
    filled = {"rounds": {"window": 4}, "fill": {"name": "penalty"}}
    assert refusal(resolve, filled).startswith("rounds.window is 4, which has an effect only ")
    for asked in ({"window": 4}, {"sweeps": 2}, {"window": "all", "correct_every": 0}):
        config = resolve({"rounds": asked})
        assert (config.solver["name"], config.fill["name"]) == (registry.WINDOWED, "none")
    for asked in ({"window": 4, "correct_every": 8}, {"serial_end": True}):
        config = resolve({"rounds": asked})
        assert config.solver["name"] == registry.DEFAULT


BUDGETS = [(8, 8), (0, 8)]


@pytest.fixture
def stored(tmp_path):
    """The settings that a run with filled waits has written."""
    tree = {
        "fill": {"name": "penalty", "beta": 0.5},
        "rounds": {"local_budget": BUDGETS, "memory_gb": 2.0},
    }
    path = tmp_path / "config.toml"
    path.write_text(to_toml(resolve(tree)))
    return path


@pytest.mark.parametrize("overrides", [{}, {"solver.name": "ddg"}, {"train.epochs": 9}], ids=str)
def test_a_run_taken_up_again_has_its_own_rounds(stored, overrides):
    config = load(None, overrides, base=stored)
    assert config.rounds == RoundSettings(local_budget=BUDGETS, memory_gb=2.0)
    assert config.fill["beta"] == 0.5


@pytest.mark.parametrize("solver", sorted({*CLASSES} - {"ddg"}))
def test_a_run_taken_up_with_another_solver_drops_what_was_the_old_ones(solver, stored):
    config = load(None, {"solver.name": solver}, base=stored)
    afresh = resolve({"solver": {"name": solver}, "rounds": {"memory_gb": 2.0}})
    assert (config.rounds, config.solver) == (afresh.rounds, afresh.solver)
    assert (config.correction, config.fill) == (afresh.correction, {"name": "none"})
