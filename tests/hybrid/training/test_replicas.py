"""A grid of blocks and replicas: the bits of one chain, and what a checkpoint gives back."""

import hashlib
import shutil

import pytest
from answers import output
from trainings import (
    BATCH,
    assert_same,
    digests,
    digits,
    fitted,
    interrupted,
    newest,
    refused,
    summary,
    trainer,
    weights,
)

from hybrid.folder import checkpoint
from hybrid.settings.config import CheckpointSettings, LinkSettings
from hybrid.training.run import Run
from solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    AuxNet,
    Backprop,
    BlockADMM,
    FeaturesReplay,
    LocalUpdates,
    Penalty,
    Petra,
)
from solvers.sync.all_reduce import AllReduce
from solvers.sync.diloco import DiLoCo
from solvers.sync.hpsgd import HPSGD
from solvers.sync.local_sgd import LocalSGD

EVERY = {
    solver.name: solver
    for solver in (
        *(Backprop(micro_batches=2), Penalty(), AugmentedLagrangian(), BlockADMM(), AuxNet()),
        *(DDG(), FeaturesReplay(), FDG(), Petra(), LocalUpdates()),
    )
}
SYNCS = {
    "all-reduce": AllReduce(),
    "all-reduce, int8": AllReduce(messages="int8"),
    "local-sgd": LocalSGD(steps=3),
    "diloco": DiLoCo(steps=2, lag=1, streamed=True),
    "diloco, int8": DiLoCo(steps=2, lag=1, messages="int8"),
    "hpsgd": HPSGD(steps=2, lag=2),
    "hpsgd, discard": HPSGD(steps=3, lag=1, drift="discard"),
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


@pytest.mark.parametrize(("replicas", "batch"), [(2, 32), (3, 32), (4, 30)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_replicas_have_the_bits_of_one_chain_that_accumulates(replicas, batch, blocks, few):
    settings = {"train": {"batch_size": batch}, "blocks": blocks}
    found = fitted(trainer(Backprop(), replicas=replicas, **settings), few)
    expected = fitted(trainer(Backprop(micro_batches=replicas), **settings), few)
    assert_same(learnt(found), learnt(expected))


@pytest.mark.parametrize(("name", "replicas"), [*((name, 2) for name in EVERY), ("backprop", 4)])
def test_replicas_of_the_same_data_are_one(name, replicas, few, monkeypatch):
    """Each has the whole mini-batch, as if its samples came R times."""
    solver = EVERY[name]
    model = "revnet8" if name == "petra" else "resnet8"
    expected = fitted(trainer(solver, model=model, **_window(name)), few)
    monkeypatch.setattr("solvers.windows.Batch.of_replica", _whole)
    monkeypatch.setattr("hybrid.method.method.share_size", lambda size, replica, replicas: size)
    start = AllReduce.start
    monkeypatch.setattr(AllReduce, "start", lambda *args: start(*args[:-1], 1 / replicas))
    made = trainer(solver, model=model, replicas=replicas, **_window(name))
    assert_same(fitted(made, few), expected)


def _whole(batch, replica, replicas):
    return (
        batch
        if replicas == 1
        else type(batch)(
            batch.ids, batch.learning_rate, batch.source, batch.step, total=replicas * len(batch)
        )
    )


def _window(name):
    if name == "augmented-lagrangian":
        return {"gaps": [(16, 8), (0, 24)]}
    return {"window": 2} if name in ("penalty", "block-admm", "auxnet") else {}


@pytest.mark.parametrize("replicas", [2, 3])
def test_hpsgd_without_rounds_is_all_reduce_over_epochs(replicas, few):
    """Momenta that are equal are not averaged: the mean of three equal numbers is another."""
    settings = {"model": "plain", "replicas": replicas, "train": {"batch_size": 30}}
    found = fitted(trainer(Backprop(), sync=HPSGD(steps=1, lag=0), **settings), few)
    assert_same(found, fitted(trainer(Backprop(), sync=AllReduce(), **settings), few))


@pytest.mark.parametrize("name", EVERY)
def test_a_grid_of_threads_has_the_bits_of_virtual_clocks(name, few):
    solver, settings = EVERY[name], _window(name)
    found = fitted(trainer(solver, replicas=2, **settings), few)
    virtual = trainer(solver, replicas=2, links=LinkSettings(kind="virtual"), **settings)
    assert_same(found, fitted(virtual, few))


@pytest.mark.parametrize("sync", ["all-reduce", "all-reduce, int8", "diloco", "hpsgd"])
def test_a_grid_under_mpirun_has_the_bits_of_threads(sync, world, tmp_path, few):
    made, out = SYNCS[sync], tmp_path / "run"
    flags = [f"sync.{k}={v}" for k, v in vars(made).items()]
    words = [word for flag in [f"sync.name={made.name}", *flags] for word in ("--set", flag)]
    side = "peers" if sync == "all-reduce" else "auto"
    output(
        world.hybrid(
            *(4, *FLAGS, "--solver", "backprop", "--replicas", 2, *words, "--out", out),
            *(("--set", f"split.side_by_side={side}")),
        )
    )
    assert summary(out)["replicas"] == 2
    assert_same(weights(out), fitted(trainer(Backprop(), replicas=2, sync=made), digits_of(few)))


def digits_of(few):
    from hybrid import data

    return few[0], data.load("digits")[1]


@pytest.mark.parametrize("name", EVERY)
def test_all_replicas_are_equal_after_every_step(name, few, monkeypatch):
    seen: dict[tuple[int, int], list[str]] = {}
    build = Run._begin

    def watched(run):
        build(run)
        sync, place = run.block.sync, run.links.place
        log = seen.setdefault((place.block, place.replica), [])
        after = sync.after_step

        def noted(kind):
            after(kind)
            content = b"".join(t.numpy().tobytes() for t in run.block.module.state_dict().values())
            log.append(kind + hashlib.sha256(content).hexdigest())

        sync.after_step = noted

    monkeypatch.setattr(Run, "_begin", watched)
    fitted(trainer(EVERY[name], replicas=3, **_window(name)), few)
    for block in range(2):
        assert len(seen[block, 0]) >= 8
        assert seen[block, 0] == seen[block, 1] == seen[block, 2]


@pytest.mark.parametrize("sync", SYNCS)
def test_resumed_is_uninterrupted(sync, few, tmp_path, monkeypatch):
    """From a checkpoint after any mini-batch; the whole grid's, with what is under way."""
    monkeypatch.setattr("hybrid.method.settle.WINDOW", 1)  # or reports wait for its end
    settings = {"replicas": 2, "sync": SYNCS[sync], "train": {"report_every": 1}}
    # where statistics are equal after a step alone, and a report comes in between
    solver = DDG(micro_batches=4) if SYNCS[sync].exact else Backprop()
    expected = fitted(trainer(solver, **settings), few)
    whole = tmp_path / "whole"
    monkeypatch.setattr("hybrid.training.shared_folder.SharedFolder.due", lambda folder: True)
    every = CheckpointSettings(keep_last=0, minutes=1)
    fitted(trainer(solver, whole, checkpoint=every, **settings), few)
    for after in (4, 6, 7):  # in the second epoch
        run = shutil.copytree(whole, tmp_path / str(after))
        for folder in checkpoint.complete(run / "checkpoints"):
            if int(folder.name) > after:
                shutil.rmtree(folder)
        # a pipeline reports after each of its blocks
        assert int(newest(run).name) == (after - after % 2 if SYNCS[sync].exact else after)
        (run / "summary.json").unlink()
        again = trainer(solver, run, checkpoint=every, resume=True, **settings)
        assert_same(fitted(again, few), expected)


def test_a_checkpoint_has_weights_once_a_block(few, tmp_path):
    alone, grid = tmp_path / "alone", tmp_path / "grid"
    for out, replicas in ((alone, 1), (grid, 3)):
        fitted(trainer(Backprop(), out, replicas=replicas), few)
    sizes = [
        sum(p.stat().st_size for p in newest(out).glob("*.safetensors")) for out in (alone, grid)
    ]
    assert sizes[0] == sizes[1]
    assert digests(alone).keys() == digests(grid).keys()


@pytest.mark.parametrize("grid", [(2, 1), (2, 3), (1, 2), (3, 1)])
@pytest.mark.parametrize("sync", ["all-reduce", "local-sgd"])
def test_a_run_goes_on_on_any_grid(grid, sync, few, tmp_path):
    """Other replicas round otherwise: weights agree to a tolerance, and training goes on."""
    blocks, replicas = grid
    run, sync = tmp_path / "run", SYNCS[sync]
    plain = {"model": "plain", "sync": sync}
    expected = fitted(trainer(Backprop(), run, replicas=2, **plain), few)
    interrupted(run, after=1)
    if replicas == 1:
        plain.pop("sync")
    made = trainer(Backprop(), run, blocks, replicas=replicas, resume=True, **plain)
    found = fitted(made, few)
    assert summary(run)["replicas"] == replicas
    if replicas == 2 and sync.exact:
        assert_same(found, expected)
    bound = 1e-5 if sync.exact else 0.05
    for name, tensor in found.items():
        assert (tensor - expected[name]).norm() <= bound * expected[name].norm(), name


def test_a_lost_replica_is_left_out_by_a_resume_on_fewer_ranks(world, tmp_path):
    out = tmp_path / "run"
    output(world.hybrid(4, *FLAGS, "--solver", "backprop", "--replicas", 2, "--out", out))
    interrupted(out, after=1)
    said = output(world.hybrid(2, "train", "--resume", "--out", out))
    assert "2 blocks" in said
    assert (summary(out)["blocks"], summary(out)["replicas"]) == (2, 1)


GRIDS = [
    ((3, "--replicas", 2), "3 ranks cannot form a grid of 2 replicas"),
    ((4, "--replicas", 4, "--blocks", 2), "mpirun -n 8, or 2 replicas, or 1 block"),
]


@pytest.mark.parametrize(("asked", "reason"), GRIDS)
def test_a_wrong_product_names_both_divisors(asked, reason, world, tmp_path):
    ranks, *words = asked
    status, _, err = world.hybrid(ranks, *FLAGS, *words, "--out", tmp_path / "run")
    assert status
    assert err.count("hybrid: error:") == 1
    assert reason in err
    assert not (tmp_path / "run").exists()


def test_ranks_over_blocks_are_replicas(world, tmp_path):
    out = tmp_path / "run"
    output(world.hybrid(4, *FLAGS, "--blocks", 2, "--out", out))
    assert (summary(out)["blocks"], summary(out)["replicas"]) == (2, 2)


REFUSED = [
    ({"replicas": 1, "sync": LocalSGD()}, "sync.name is 'local-sgd', but there is 1 replica"),
    ({"replicas": 1, "sync": AllReduce(messages="int8")}, "sync.messages is 'int8', but there"),
    ({"replicas": 1, "side_by_side": "peers"}, "split.side_by_side is 'peers', but there is 1"),
    ({"train": {"sync_batchnorm": True}}, "train.sync_batchnorm is True, but there is 1 replica"),
    (
        {"replicas": 2, "model": "plain", "train": {"sync_batchnorm": True}},
        "train.sync_batchnorm is True, but the network has no BatchNorm",
    ),
    (
        {"replicas": 3, "train": {"sync_batchnorm": True}},
        "train.batch_size 32 gives 3 replicas unequal shares, so passes that cannot agree: take 30",
    ),
    (
        {"replicas": 2, "sync": HPSGD(lag=0, drift="discard")},
        "sync.drift is 'discard', but sync.lag is 0",
    ),
    (
        {"replicas": 2, "blocks": 1, "sync": DiLoCo(streamed=True)},
        "sync.streamed is True, but there is 1 block",
    ),
    ({"replicas": 33}, "split.replicas is 33, and a mini-batch has 32 samples"),
    ({"replicas": 0}, "split.replicas is 0"),
    ({"replicas": 2, "sync": DiLoCo(), "train": {"ema": 0.9}}, "train.ema is 0.9, and replicas"),
    (
        {"replicas": 2, "sync": LocalSGD(), "train": {"precision": "float16"}},
        "train.precision is float16, and replicas have other weights within a round of local-sgd",
    ),
    (
        {"replicas": 2, "sync": AllReduce("int8"), "train": {"precision": "float16"}},
        "sync.messages is 'int8', and train.precision 'float16'",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_what_replicas_cannot_do_is_refused(settings, reason, few):
    assert reason in refused(trainer(Backprop(), **settings), few)


@pytest.mark.parametrize(
    ("solver", "sync", "reason"),
    [
        (AugmentedLagrangian(), HPSGD(), "adds up gradients of one kind of step"),
        (LocalUpdates(), DiLoCo(), "'local-updates' trains others beside them"),
        (AuxNet(), DiLoCo(), "'auxnet' trains others beside them"),
        (Backprop(clip_norm=0.5), HPSGD(), "solver.clip_norm is 0.5, and 'hpsgd' steps on sums"),
    ],
)
def test_strategies_that_a_solver_cannot_do_with_are_refused(solver, sync, reason, few):
    made = trainer(solver, replicas=2, sync=sync, **_window(solver.name))
    assert reason in refused(made, few)


def test_batchnorm_over_all_replicas_is_that_of_one(few):
    """Up to rounding, which a few steps enlarge; without it the weights are far away."""
    plain = fitted(trainer(Backprop()), few)
    apart = {}
    for synced in (True, False):
        settings = {"train": {"sync_batchnorm": synced}, "replicas": 2}
        found = fitted(trainer(Backprop(), **settings), few)
        apart[synced] = max(float((found[k] - plain[k]).abs().max()) for k in learnt(plain))
    assert apart[True] < 1e-3 < apart[False]
