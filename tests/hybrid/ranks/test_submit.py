"""`hybrid submit`: what sbatch gets, and wrong requests in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from hybrid.cli.app import app
from hybrid.cli.failure import run_command
from hybrid.ranks.slurm import SlurmJob, script
from tests.hybrid.ranks.slurm_stand_ins import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def submit(capfd, tmp_path, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """`hybrid submit` of a small TOML file, 2 nodes of 2 ranks: (exit status, stdout, stderr)."""
    (tmp_path / "run.toml").write_text("[split]\nblocks = 4\n")
    monkeypatch.chdir(tmp_path)
    words = ["submit", "run.toml", "--nodes", "2", "--ranks-per-node", "2", "--out", "runs/first"]

    def run(*more: str) -> tuple[int, str, str]:
        capfd.readouterr()
        command = typer.main.get_command(app)
        status = run_command(lambda: command.main(args=[*words, *more], standalone_mode=False))
        return status, *capfd.readouterr()

    return run


def test_a_dry_run_prints_the_script_and_leaves_nothing(submit, tmp_path) -> None:
    status, out, err = submit("--dry-run", "--set", "optimizer.lr=0.2")
    request = SlurmJob(tmp_path / "run.toml", tmp_path / "runs" / "first", 2, 2, 1)
    assert (status, err) == (0, "")
    assert out == script(replace(request, settings=("optimizer.lr=0.2",)))
    assert not (tmp_path / "runs").exists()


def test_no_gpu_is_asked_for_where_the_settings_say_cpu(submit) -> None:
    assert "gpus" not in submit("--dry-run", "--set", "train.device=cpu")[1]


def test_code_of_ones_own_is_named_by_who_submits_and_reaches_the_job(submit, tmp_path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nname = 'own:network'\n")
    status, _, err = submit("--dry-run", "--set", "split.blocks=4")
    assert (status, err.count("\n")) == (1, 1)
    assert "give --model own:network on the command line" in err
    words = ("--model", "own:network", "--data", "own:data", "--loss", "own:loss")
    status, out, _ = submit("--dry-run", "--set", "split.blocks=4", *words)
    assert status == 0
    named = ("model.name=own:network", "data.name=own:data", "train.loss=own:loss")
    assert f"--set {' --set '.join(named)} --set split.blocks=4" in out


@pytest.mark.parametrize("by", [("--replicas", "2"), ("--set", "split.replicas=2")])
def test_replicas_reach_the_job(submit, by) -> None:
    status, out, err = submit("--dry-run", "--ranks-per-node", "4", *by)
    assert (status, err) == (0, "")
    assert f"{by[0]} {by[1]}" in out


def test_sbatch_gets_the_script_and_the_number_is_printed(
    submit, cluster, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    status, out, _ = submit()
    file = tmp_path / "runs" / "first.sbatch"
    assert (status, out) == (0, "17\n")
    assert cluster.calls() == [["sbatch", "--parsable", str(file)]]
    assert file.read_text() == submit("--dry-run")[1]
    assert list(file.parent.iterdir()) == [file]


def test_what_sbatch_says_against_it_is_one_line(submit, cluster, tmp_path, monkeypatch) -> None:
    cluster.program("sbatch", "sys.exit('sbatch: error:\\nInvalid account')")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
        assert_one_line(submit(), "refused", "sbatch: error: Invalid account")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_line(submit(), "no sbatch here", "--dry-run")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--ranks-per-node", "3"), ("6 ranks", "grid of 4 blocks", "= 4 or", "or 6 blocks")),
        (("--set", "split.cuts=['a', 'b']", "--set", "split.blocks=0"), ("grid of 3 blocks",)),
        (("--replicas", "2"), ("4 blocks x 2 replicas", "or 1 replica, or 2 blocks")),
        (("--nodes", "0"), ("--nodes", "1")),
        (("--max-requeues", "-1"), ("--max-requeues", "0")),
        (("--launcher", "prun"), ("'prun'", "mpirun or srun")),
        (("--out", "a\nb"), ("line break",)),
        (("--set", "data.dir=a\nb"), ("line break",)),
        (("--setup", "module load \\"), ("--setup", "must not end in")),
        (("--set", "optimizer.rl=1"), ("optimizer.rl", "optimizer.lr")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_request_is_one_line_with_a_remedy(submit, tmp_path, flags, parts) -> None:
    assert_one_line(submit(*flags), *parts)
    assert not (tmp_path / "runs").exists()


def assert_one_line(answer: tuple[int, str, str], *parts: str) -> None:
    status, out, err = answer
    assert (status in (1, 2), out) == (True, "")
    assert err.startswith("hybrid: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
