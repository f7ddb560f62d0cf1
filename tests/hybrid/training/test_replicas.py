"""A grid of blocks and replicas: the bits of one chain, and what a checkpoint gives back."""

from dataclasses import replace

import pytest
from answers import output
from trainings import (
    BATCH,
    OFTEN,
    assert_same,
    digests,
    digits,
    interrupted,
    newest,
    refused,
    stopped,
    summary,
    trained_weights,
    trainer,
    weights,
)

from hybrid.settings.config import LinkSettings
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    FeaturesReplay,
    LocalUpdates,
    Penalty,
    Petra,
    registry,
)
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD

EVERY = {
    solver.name: solver
    for solver in (
        *(Backprop(micro_batches=2), Penalty(), AugmentedLagrangian(), BlockADMM()),
        *(DDG(), FeaturesReplay(), FDG(), Petra(), LocalUpdates()),
    )
}
SYNCS = {
    "all-reduce": AllReduce(),
    "all-reduce, int8": AllReduce(messages="int8"),
    "local-sgd": LocalSGD(steps=3),
    "diloco": DiLoCo(steps=2, lag=1),
    "diloco, int8": DiLoCo(steps=2, lag=1, messages="int8"),
}
FLAGS = (
    *("train", "--epochs", 2, "--batch-size", BATCH, "--set", "train.threads=1"),
    *("--set", f"data.limit={4 * BATCH}", "--set", "checkpoint.keep_last=0"),
)


@pytest.fixture(scope="module")
def few():
    return digits(4)


def learnt(state):
    """Without what counts passes and averages over them."""
    return {k: v for k, v in state.items() if "running" not in k and "num_batches" not in k}


def model_of(name):
    """Without convolutions, which take most of the time, where a method or BatchNorm needs none."""
    return {"petra": "revnet8", "backprop": "resnet8"}.get(name, "plain")


@pytest.mark.parametrize(("blocks", "replicas", "batch"), [(2, 3, 32), (1, 4, 30)])
def test_replicas_have_the_bits_of_one_chain_that_accumulates(replicas, batch, blocks, few):
    settings = {"train": {"batch_size": batch}, "blocks": blocks}
    found = trained_weights(trainer(Backprop(), replicas=replicas, **settings), few)
    expected = trained_weights(trainer(Backprop(micro_batches=replicas), **settings), few)
    assert_same(learnt(found), learnt(expected))


def _window(name):
    if name == "ddg":
        return {"fill": "augmented-lagrangian", "local_budget": [(2, 2), (0, 4)]}
    alternates = registry.solver_class(name).alternates
    return {"window": 2} if alternates else {}


@pytest.mark.parametrize(
    ("sync", "asked"),
    [
        ("all-reduce, int8", ("--replicas", 2, "--set", "split.side_by_side=peers")),
        ("diloco", ("--blocks", 2)),  # four ranks over two blocks are two replicas
    ],
)
def test_a_grid_under_mpirun_has_the_bits_of_threads(sync, asked, world, tmp_path, few):
    made, out = SYNCS[sync], tmp_path / "run"
    flags = [f"sync.{k}={v}" for k, v in vars(made).items()]
    words = [word for flag in [f"sync.name={made.name}", *flags] for word in ("--set", flag)]
    output(world.hybrid(4, *FLAGS, "--solver", "backprop", *asked, *words, "--out", out))
    assert (summary(out)["blocks"], summary(out)["replicas"]) == (2, 2)
    assert_same(weights(out), trained_weights(trainer(Backprop(), replicas=2, sync=made), few))


@pytest.mark.parametrize("name", EVERY)
def test_replicas_of_the_same_data_are_one(name, few, monkeypatch):
    """Each has the whole mini-batch, as if its samples came twice, here on virtual clocks."""
    solver, model = EVERY[name], model_of(name)
    expected = trained_weights(trainer(solver, model=model, **_window(name)), few)
    monkeypatch.setattr("hybrid.solvers.windows.Batch.of_replica", _whole)
    monkeypatch.setattr("hybrid.method.method.share_size", lambda size, replica, replicas: size)
    start = AllReduce.start
    monkeypatch.setattr(AllReduce, "start", lambda *args: start(*args[:-1], 1 / 2))
    links = LinkSettings(kind="virtual")
    both = trainer(solver, model=model, replicas=2, links=links, **_window(name))
    assert_same(trained_weights(both, few), expected)


def _whole(batch, replica, replicas):
    if replicas == 1:
        return batch
    return replace(batch, total=replicas * len(batch))


def test_every_strategy_is_tried():
    assert {sync.name for sync in SYNCS.values()} == {*STRATEGIES.places}


def test_every_solver_that_replicas_can_train_is_tried():
    assert {*EVERY} == {*registry.OWN}


@pytest.mark.parametrize("sync", SYNCS)
def test_resumed_is_uninterrupted(sync, few, tmp_path, monkeypatch):
    """From a checkpoint after any mini-batch, with what is under way; it changes nothing itself."""
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)  # or reports wait for its end
    settings = {"replicas": 2, "sync": SYNCS[sync], "train": {"report_every": 1}}
    settings["model"] = "resnet8" if sync == "diloco" else "plain"
    seldom = {**settings, "train": {"report_every": 1, "evaluate_every": 2}}
    # where statistics are equal after a step alone, and a report comes in between
    solver = DDG(micro_batches=4) if SYNCS[sync].exact else Backprop()
    expected = trained_weights(trainer(solver, **seldom), few)
    run = tmp_path / "run"
    settings["checkpoint"] = OFTEN
    assert_same(trained_weights(trainer(solver, run, **settings), few), expected)
    stopped(run, 6)  # in the second epoch, with a sum or a round under way
    assert int(newest(run).name) == 6
    assert_same(trained_weights(trainer(solver, run, resume=True, **settings), few), expected)


def test_a_checkpoint_has_weights_once_a_block(few, tmp_path):
    alone, grid = tmp_path / "alone", tmp_path / "grid"
    for out, replicas in ((alone, 1), (grid, 3)):
        trained_weights(trainer(Backprop(), out, replicas=replicas), few)
    sizes = [
        sum(p.stat().st_size for p in newest(out).glob("*.safetensors")) for out in (alone, grid)
    ]
    assert sizes[0] == sizes[1]
    assert digests(alone).keys() == digests(grid).keys()


@pytest.mark.parametrize(
    ("grid", "sync"), [((2, 3), "all-reduce"), ((1, 2), "local-sgd"), ((3, 1), "all-reduce")]
)
def test_a_run_goes_on_on_any_grid(grid, sync, few, tmp_path):
    """Other replicas round otherwise: weights agree to a tolerance, and training goes on."""
    blocks, replicas = grid
    run, sync = tmp_path / "run", SYNCS[sync]
    plain = {"model": "plain", "sync": sync}
    expected = trained_weights(trainer(Backprop(), run, replicas=2, **plain), few)
    interrupted(run, after=1)
    if replicas == 1:
        plain.pop("sync")
    made = trainer(Backprop(), run, blocks, replicas=replicas, resume=True, **plain)
    found = trained_weights(made, few)
    assert summary(run)["replicas"] == replicas
    if replicas == 2 and sync.exact:
        assert_same(found, expected)
    bound = 1e-5 if sync.exact else 0.05
    for name, tensor in found.items():
        assert (tensor - expected[name]).norm() <= bound * expected[name].norm(), name


def test_a_wrong_product_names_both_divisors(world, tmp_path):
    words = ("--replicas", 4, "--blocks", 2)
    status, _, err = world.hybrid(4, *FLAGS, *words, "--out", tmp_path / "run")
    assert status
    assert err.count("hybrid: error:") == 1
    assert "mpirun -n 8, or 2 replicas, or 1 block" in err
    assert not (tmp_path / "run").exists()


# the settings whose declared conditions refuse them: tests/test_settings_act.py
REFUSED = [
    ({"train": {"sync_batchnorm": True}}, "only where there are replicas: leave"),
    ({"replicas": 3, "train": {"sync_batchnorm": True}}, "here 3 replicas share 32 samples"),
    ({"replicas": 33}, "split.replicas is 33, and a mini-batch has 32 samples"),
    ({"replicas": 0}, "split.replicas is 0"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_what_replicas_cannot_do_is_refused(settings, reason, few):
    assert reason in refused(trainer(Backprop(), **settings), few)


def test_batchnorm_over_all_replicas_is_that_of_one(few):
    """Up to rounding, which a few steps enlarge; without it the weights are far away."""
    plain = trained_weights(trainer(Backprop()), few)
    apart = {}
    for synced in (True, False):
        settings = {"train": {"sync_batchnorm": synced}, "replicas": 2}
        found = trained_weights(trainer(Backprop(), **settings), few)
        apart[synced] = max(float((found[k] - plain[k]).abs().max()) for k in learnt(plain))
    assert apart[True] < 1e-3 < apart[False]
