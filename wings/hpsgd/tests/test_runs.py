"""Runs with hpsgd keep to what every strategy keeps to."""

from itertools import cycle

import pytest
import torch
from answers import output
from setting_modes import EXACT, Mode
from trainings import assert_same, digits, refused, summary, trained_weights, trainer, weights

from hybrid.settings.config import LinkSettings, OptimizerSettings
from hybrid.solvers import Backprop
from hybrid.solvers.registry import STRATEGIES
from hybrid_hpsgd import HPSGD
from tests import test_settings_act as act
from tests.hybrid.bench.plan import test_grids as grids
from tests.hybrid.rounds import test_host_reads as host_reads
from tests.hybrid.training import test_frozen_costs as frozen_costs
from tests.hybrid.training import test_replicas as replicas
from tests.hybrid.training import test_unlike_replicas as unlike

pytestmark = pytest.mark.skipif(
    "hpsgd" not in STRATEGIES, reason="the package is installed without its entry points"
)
SYNCS = {"keep": HPSGD(steps=2, lag=2), "discard": HPSGD(steps=3, lag=1, drift="discard")}


@pytest.fixture(scope="module")
def few():
    return digits(4)


@pytest.mark.parametrize("name", SYNCS)
def test_resumed_is_uninterrupted(name, few, tmp_path, monkeypatch):
    monkeypatch.setitem(replicas.SYNCS, "hpsgd", SYNCS[name])
    replicas.test_resumed_is_uninterrupted("hpsgd", few, tmp_path, monkeypatch)


def test_a_grid_under_mpirun_has_the_bits_of_threads(world, tmp_path, few, monkeypatch):
    monkeypatch.setitem(replicas.SYNCS, "hpsgd", HPSGD(steps=2, lag=1))
    asked = ("--replicas", 2)
    replicas.test_a_grid_under_mpirun_has_the_bits_of_threads("hpsgd", asked, world, tmp_path, few)


def test_a_grid_goes_back_into_a_round_on_all_ranks_alike(monkeypatch, few, tmp_path):
    monkeypatch.setitem(unlike.SYNCS, "hpsgd", HPSGD(steps=3, lag=2))
    back = unlike.test_a_grid_goes_back_into_a_round_on_all_ranks_alike
    names = back.__code__.co_varnames[: back.__code__.co_argcount]
    given = {"replica": 1, "sync": "hpsgd", "monkeypatch": monkeypatch}
    given |= {"few": few, "tmp_path": tmp_path}
    back(**{name: given[name] for name in names})


def test_its_costs_are_those_of_its_formulas(monkeypatch):
    frozen_costs.test_bytes_between_ranks_do_not_depend_on_what_is_frozen(
        HPSGD(2, lag=1), monkeypatch
    )
    grids.test_memory_counts_what_a_strategy_keeps(HPSGD(), 5)
    host_reads.test_a_step_of_no_strategy_reads_a_tensor("hpsgd")


ADAMW = OptimizerSettings(name="adamw", lr=1e-3)
READY = HPSGD(commit="ready")
REFUSED = [
    (Backprop(), {"sync": HPSGD(), "optimizer": ADAMW}, "the optimizer is AdamW, and sync.name"),
    (Backprop(clip_norm=1.0), {"sync": HPSGD()}, "works only where solver.clip_norm is 0"),
    (
        Backprop(),
        {"sync": READY, "blocks": 1, "links": LinkSettings(kind="virtual")},
        "sync.commit is 'ready', and nobody can ask on a virtual clock",
    ),
    (
        Backprop(),
        {"sync": READY, "blocks": 2},
        "'ready', which works only where there is one block",
    ),
    (
        Backprop(),
        {"sync": HPSGD(commit="ready", lag=2), "blocks": 1},
        "sync.lag is 2, which has an effect only where sync.commit is lag: leave it out",
    ),
]


@pytest.mark.parametrize(("solver", "settings", "reason"), REFUSED)
def test_what_it_cannot_do_is_refused(solver, settings, reason, few):
    assert reason in refused(trainer(solver, replicas=2, model="plain", **settings), few)


@pytest.mark.slow
def test_a_plan_cannot_tell_when_sums_arrive(hybrid):
    words = ("--replicas", 2, "--blocks", 1, "--model", "resnet8", "--set", "sync.name=hpsgd")
    status, _, err = hybrid("plan", *words, "--set", "sync.commit=ready")
    assert status
    assert "sync.commit is 'ready', and nobody can ask on a virtual clock" in err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"steps": 2, "lag": 3}, "lag is 3 of rounds of 2 steps: choose one of at most"),
        ({"drift": "lose"}, "drift is 'lose'; choose one of discard, keep"),
        ({"commit": "redy"}, "commit is 'redy'; choose one of lag, ready; did you mean 'ready'?"),
        ({"commit": "ready", "order": "replicas"}, "commit is 'ready': leave order out"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, reason):
    with pytest.raises(ValueError, match=reason.replace("?", r"\?")):
        HPSGD(**given)


def test_every_setting_of_its_own_acts_or_is_refused():
    """Rounds that end within an epoch of five mini-batches."""
    settings = {"split.replicas": 2, "data.limit": 40, "sync.steps": 2, "sync.lag": 1}
    same = {**dict.fromkeys(EXACT, "gradients are exact")}
    mode = Mode("backprop", "hpsgd", {**settings, "sync.name": "hpsgd"}, same)
    ours = [f"sync.{key}" for key in ("name", "steps", "commit", "lag", "drift")]
    assert not act.faults(zip(ours, cycle([mode]), strict=False))


def test_replicas_that_commit_when_ready_end_equal_and_go_on(few, tmp_path):
    """On threads: another run has other bits, but no replica has others than the next."""
    run = tmp_path / "run"
    settings = {"sync": HPSGD(steps=3, commit="ready"), "blocks": 1, "replicas": 2}
    settings |= {"checkpoint": replicas.OFTEN, "train": {"report_every": 1}, "model": "plain"}
    first = trained_weights(trainer(Backprop(), run, **settings), few)
    replicas.stopped(run, 6)
    again = trained_weights(trainer(Backprop(), run, resume=True, **settings), few)
    assert summary(run)["epochs"] == 2
    for name, tensor in again.items():
        assert (tensor - first[name]).norm() <= 0.5 * first[name].norm(), name


def test_replicas_that_commit_when_ready_train_under_mpirun(world, tmp_path):
    """Processes take seconds to start."""
    out = tmp_path / "run"
    flags = ("sync.name=hpsgd", "sync.commit=ready", "sync.steps=3")
    words = [word for flag in flags for word in ("--set", flag)]
    output(
        world.hybrid(
            2, *replicas.FLAGS, "--solver", "backprop", "--blocks", 1, *words, "--out", out
        )
    )
    assert summary(out)["sync"] == "hpsgd"
    assert all(torch.isfinite(x).all() for x in weights(out).values() if x.is_floating_point())
    replicas.interrupted(out, after=1)
    output(world.hybrid(2, "train", "--resume", *words, "--out", out))
    assert summary(out)["epochs"] == 2


def test_threads_and_static_rounds_have_the_same_bits_run_after_run(few):
    settings = {"sync": SYNCS["keep"], "blocks": 1, "replicas": 2, "model": "plain"}
    one, other = (trained_weights(trainer(Backprop(), **settings), few) for _ in range(2))
    assert_same(one, other)
