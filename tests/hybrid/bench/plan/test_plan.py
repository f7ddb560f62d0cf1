"""Predictions on virtual links."""

import runpy
import shlex
from pathlib import Path

import pytest
import torch
from answers import assert_one_line, output

from hybrid.bench.plan import planner as plan
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.method.memory import saved_bytes
from hybrid.networks.models import build as build_model
from hybrid.networks.partition.split import split
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, FDG, FeaturesReplay, LocalUpdates, Petra
from hybrid.solvers.delayed.ddg import LOST
from hybrid.training import build
from hybrid_messages import PDASGD

DIGITS = {"data.name": "digits", "data.limit": 512, "train.batch_size": 64, "train.threads": 1}


def planner(network=None, **settings):
    resolved = load(None, {**DIGITS, **settings})
    images, _ = build.load_data_sets(resolved.data)
    return plan.Planner(
        resolved, build.build_model(resolved, images), images, network or LinkSpeed()
    )


@pytest.mark.parametrize(
    "setting",
    [
        *("rounds.correct_every=3", "rounds.serial_end=true", "correction.micro_batches=16"),
        *("train.precision=bfloat16", "train.batch_size=64", "split.balance=even"),
        *("split.blocks=3", "split.cuts=['layer2.0', 'layer3.0']", "sync.name=local-sgd"),
        *("train.sync_batchnorm=true", "split.side_by_side=peers", "train.compile=true"),
    ],
)
def test_what_a_plan_would_not_heed_is_refused(hybrid, setting):
    words = ("plan", "--data", "digits", "--blocks", "2", "--batch-size", "16")
    name = setting.partition("=")[0]
    said = "the batch size is 64" if name == "train.batch_size" else name
    assert_one_line(hybrid(*words, "--set", "data.limit=32", "--set", setting), said)


def test_the_users_cuts_and_other_settings_are_planned_for_and_in_the_command(hybrid):
    """A command that left one out would train another network, or otherwise."""
    asked = {
        "split.cuts": '["layer3.0"]',
        "split.side_by_side": "peers",
        "rounds.memory_gb": "9.0",
        "data.limit": "64",
        "optimizer.name": "adamw",
        "optimizer.arguments.betas": "[0.8, 0.9]",
        "train.ema": "0.9",
        "schedule.name": "constant",
        "solver.messages": "int8",
        "solver.adjoints": "int4",
    }
    flags = [word for pair in asked.items() for word in ("--set", "=".join(pair))]
    words = ("plan", "--data", "digits", "--micro-batches", "2", "--batch-size", "16")
    words += ("--blocks", "2", "--replicas", "2")
    said = output(hybrid(*words, "--solver", "ddg", *flags))
    found = shlex.split(said.splitlines()[-1])
    del asked["solver.messages"], asked["solver.adjoints"]  # of a row, and not the fastest
    assert all("=".join(pair) in found for pair in asked.items())
    assert "| ddg, m=2, int8 / int4 messages |" in said


def test_memory_for_auxiliary_variables_is_a_limit():
    made = planner(**{"rounds.memory_gb": 1e-6, "train.batch_size": 16, "fill.name": "penalty"})
    found = list(made.predictions([Grid(2)], [2]))
    assert not [p for p in found if p.recipe.solver.alternates]
    assert "the budget is 1e-06 GB" in made.refused[0]


@pytest.mark.parametrize(
    "solver",
    [
        *(DDG(4), FDG(4, recompute=True), FeaturesReplay(2), Petra(2)),
        *(
            pytest.param(solver, marks=pytest.mark.slow)
            for solver in (DDG(1), FDG(1), FDG(4), FDG(4, stash=False), PDASGD(2), LocalUpdates())
        ),
    ],
    ids=str,
)
def test_the_memory_of_what_is_under_way_is_what_a_run_holds(solver, monkeypatch):
    name = "revnet8" if isinstance(solver, Petra) else "resnet8"
    script = Path(__file__).parents[4] / "docs/benchmarks/held_memory.py"
    monkeypatch.syspath_prepend(str(script.parent))
    measured = runpy.run_path(str(script))["peaks"](solver, name, 3, 16)
    blocks = split(build_model(name, 10, 3, 32), 3, inside=False)
    lam = torch.zeros(16, 3, 32, 32)
    for k, held in enumerate(measured):
        module = blocks.module(k)
        assert solver.held_bytes(module, lam, k, 3, saved_bytes) == pytest.approx(held, rel=0.1)
        lam = module(lam).detach().requires_grad_()


def test_what_is_not_measured_is_not_advised():
    assert DDG(2).progress(8, 128) is None
    assert DDG(4).progress(8, 128, "adamw") is None
    assert DDG(8).progress(8, 128) == pytest.approx(1 - LOST["sgd"][2])
    assert DDG(16).progress(8, 128, "muon") == pytest.approx(1 - LOST["muon"][1] - 0.125 * 0.06)
    assert DDG(8).progress(1, 128, "RMSprop") == 1


@pytest.mark.parametrize("solver", ["augmented-lagrangian"])
def test_the_command_prints_a_table_with_the_solvers_row_and_what_to_run(hybrid, solver):
    words = "plan --data digits --blocks 2 --micro-batches 2 --batch-size 32 --set data.limit=256"
    said = output(hybrid(*words.split(), "--set", f"solver.name={solver}"))
    found = [line.split("|")[2].strip() for line in said.splitlines() if "|" in line]
    assert [name for name in found if solver in name] == [f"{solver}, m=2, window 4"]
    assert "| 1 | plain loop |" in said
    assert "mpirun -n 2 hybrid train --model resnet8" in said
