"""A method's rounds: as asked, else as it wants; what cannot act is refused."""

from typing import Any

import pytest
from answers import refusal

from hybrid.settings.config import RoundSettings
from hybrid.settings.resolve import load, resolve, to_toml
from hybrid.solvers import registry

CLASSES = {name: registry.solver_class(name) for name in registry.OWN}
EXACT = [name for name, method in CLASSES.items() if method.exact]
ALONE = [name for name, m in CLASSES.items() if not m.alternates and not m.exact]
FILLING = [name for name, method in CLASSES.items() if method.fills]
SWEEPING = [name for name, m in CLASSES.items() if m.alternates and not m.fills]

NO_WINDOW: dict[str, Any] = {"window": None, "sweeps": None}


def rounds(solver, **asked):
    return resolve({"solver": {"name": solver}, "rounds": asked}).rounds


@pytest.mark.parametrize(
    ("solvers", "wanted", "micro_batches"),
    [
        (EXACT, RoundSettings(), 1),
        (ALONE, RoundSettings(correct_every=0), 1),
        (FILLING, RoundSettings(correct_every=1, fill=True), 4),
        (SWEEPING, RoundSettings(window=4, sweeps=1, correct_every=1, fill=False), 1),
    ],
    ids=("exact", "alone", "filling", "sweeping"),
)
def test_unless_told_otherwise_a_method_does_as_it_wants(solvers, wanted, micro_batches):
    assert solvers
    for solver in solvers:
        config = resolve({"solver": {"name": solver}})
        sweeps = wanted.sweeps and registry.solver_class(solver).sweeps
        assert config.rounds == wanted.model_copy(update={"sweeps": sweeps}), solver
        assert config.correction["micro_batches"] == micro_batches


@pytest.mark.parametrize("solver", FILLING)
@pytest.mark.parametrize(
    ("asked", "settled"),
    [
        ({"window": 4}, {"window": 4, "sweeps": 1, "correct_every": 1, "fill": False}),
        ({"window": "all"}, {"window": "all", "sweeps": 1, "correct_every": 1, "fill": False}),
        ({"sweeps": 2}, {"window": 4, "sweeps": 2, "correct_every": 1, "fill": False}),
        ({"fill": False}, {"window": 4, "sweeps": 1, "correct_every": 1, "fill": False}),
        ({"fill": True}, {**NO_WINDOW, "correct_every": 1, "fill": True}),
        ({"fill": True, "window": 8}, {"window": 8, "sweeps": 1, "correct_every": 1}),
        ({"correct_every": 0}, {"window": 4, "sweeps": 1, "correct_every": 0, "fill": False}),
        ({"correct_every": 1}, {**NO_WINDOW, "correct_every": 1, "fill": True}),
    ],
    ids=str,
)
def test_rounds_that_are_asked_for_are_as_asked(solver, asked, settled):
    assert rounds(solver, **asked) == RoundSettings(**{**asked, **settled})


@pytest.mark.parametrize("solver", registry.OWN)
def test_what_is_settled_is_settled_as_it_is(solver):
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
        (ALONE, {"correct_every": 2, "fill": True}, "rounds.fill is True, which has an effect "),
        (
            SWEEPING,
            {"fill": True},
            "rounds.fill is True, which works only where the solver has sub",
        ),
        (
            FILLING,
            {"fill": True, "correct_every": 2},
            "rounds.fill is True, which works only where every round",
        ),
        (FILLING, {"window": 4, "gaps": [(8, 8)]}, "rounds.gaps is [(8, 8)], which has an effect"),
        (FILLING, {"fill": False, "fill_step": "own"}, "rounds.fill_step is 'own', which has an"),
    ],
    ids=str,
)
def test_what_cannot_act_is_refused_in_one_line(solvers, asked, said):
    for solver in solvers:
        assert refusal(rounds, solver, **asked).startswith(said), solver


def test_what_says_nothing_of_the_rounds_leaves_the_gaps_filled():
    settings = {"memory_gb": 1.0, "fill_step": "own", "gaps": [(8, 8), (0, 8)]}
    for asked in ({"messages": "bfloat16"}, {"micro_batches": 2}):
        config = resolve({"rounds": settings, "correction": asked})
        assert config.rounds == RoundSettings(correct_every=1, fill=True, **settings)
        wanted = {"messages": "float32", "micro_batches": 4, **asked}
        assert {key: config.correction[key] for key in wanted} == wanted


@pytest.fixture
def stored(tmp_path):
    """The settings that a run with filled gaps has written."""
    tree = {"solver": {"beta": 0.5}, "rounds": {"gaps": [(8, 8), (0, 8)], "memory_gb": 2.0}}
    path = tmp_path / "config.toml"
    path.write_text(to_toml(resolve(tree)))
    return path


@pytest.mark.parametrize(
    "overrides", [{}, {"solver.name": "augmented-lagrangian"}, {"train.epochs": 9}], ids=str
)
def test_a_run_taken_up_again_has_its_own_rounds(stored, overrides):
    config = load(None, overrides, base=stored)
    gaps = [(8, 8), (0, 8)]
    assert config.rounds == RoundSettings(correct_every=1, fill=True, gaps=gaps, memory_gb=2.0)
    assert config.correction["micro_batches"] == 4
    assert config.solver["beta"] == 0.5


@pytest.mark.parametrize("solver", [*SWEEPING, *ALONE, *EXACT])
def test_a_run_taken_up_with_another_solver_drops_what_was_the_old_ones(solver, stored):
    config = load(None, {"solver.name": solver}, base=stored)
    afresh = resolve({"solver": {"name": solver}, "rounds": {"memory_gb": 2.0}})
    assert (config.rounds, config.solver) == (afresh.rounds, afresh.solver)
    assert config.correction == afresh.correction
    asked = {"rounds.sweeps": 3, "rounds.window": 8}
    if solver in SWEEPING:
        rounds = load(None, {"solver.name": solver, **asked}, base=stored).rounds
        assert (rounds.sweeps, rounds.window, rounds.fill) == (3, 8, False)
