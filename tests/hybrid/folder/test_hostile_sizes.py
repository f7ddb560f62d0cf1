"""Sizes and kinds are looked at before anything of them is read: no memory, no waiting."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from trainings import digits, interrupted, newest, refused, trainer

from hybrid import Trainer
from hybrid.folder import checkpoint
from solvers import BlockADMM

HUGE = 100 * 2**30


def made(out: Path, **more: Any) -> Trainer:
    rounds = {"window": "all", "correct_every": 0, "sweeps": 2}
    return trainer(BlockADMM(), out, **rounds, **more)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of block-admm over all mini-batches, whose Z and U are kept, after one epoch of two."""
    out = tmp_path_factory.mktemp("kept") / "run"
    made(out).fit(*digits(2))
    interrupted(out, after=1)
    return out


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def rewrite(run: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the newest manifest, with a valid checksum."""
    path = newest(run) / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    edit(body)
    path.write_text(json.dumps({**body, "sha256": checkpoint.digest(body)}))


def quickly_refused(run: Path) -> str:
    begin = perf_counter()
    said = refused(made(run, resume=True), digits(2))
    assert perf_counter() - begin < 20
    return said


@pytest.mark.parametrize("size", [HUGE, 2**40])
@pytest.mark.parametrize("name", ["stem", "cut before layer2.0"])
def test_a_file_that_claims_to_be_huge_is_not_read(name: str, size: int, run) -> None:
    """Sparse, so it takes no room; its manifest agrees with it."""
    kind = "units" if name == "stem" else "states"
    file = newest(run) / checkpoint.read_manifest(newest(run))[kind][name]["file"]
    os.truncate(file, size)
    rewrite(run, lambda body: body[kind][name].update(bytes=size))
    said = quickly_refused(run)
    assert f"{size} bytes" in said
    assert "more than" in said


def kept(run: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change what is kept at the cut, with valid checksums."""
    folder, name = newest(run), "cut before layer2.0"
    file = folder / checkpoint.read_manifest(folder)["states"][name]["file"]
    tensors = load_file(file)
    edit(tensors)
    content = save(tensors)
    file.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    new = {"file": file.name, "sha256": digest, "bytes": len(content)}
    rewrite(run, lambda body: body["states"].update({name: new}))


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop("program/kappa_in"),
        lambda tensors: tensors.pop("program/lam"),
        lambda tensors: tensors.update({"program/lam": tensors["program/lam"].long()}),
        lambda tensors: tensors.update({"program/lam": tensors["program/lam"][:, :3].clone()}),
        lambda tensors: tensors.update({"program/kappa_in": torch.zeros(())}),
        lambda tensors: tensors.update({"program/start": torch.zeros(3)}),
    ],
    ids=["no kappa", "no lam", "integers", "other channels", "a scalar", "three starts"],
)
def test_kept_variables_that_do_not_fit_are_one_line(edit, run) -> None:
    kept(run, edit)
    assert "holds what this run cannot go on with" in quickly_refused(run)


@pytest.mark.parametrize("step", ["1e999", "[1]", '"x"'])
def test_a_metric_of_an_impossible_step_is_named(step: str, run) -> None:
    file = run / "metrics.jsonl"
    text = f'{{"step": {step}, "epoch": 0, "phase": "parallel"}}\n'
    file.write_text(text + file.read_text())
    assert "line 1 of metrics.jsonl is no metric" in quickly_refused(run)


def test_a_report_takes_no_line_of_ever_so_many_values(run_folder, hybrid) -> None:
    line = {"step": 1, "epoch": 0, "phase": "parallel", "residual": [0.5] * 200_000}
    file = run_folder / "metrics.jsonl"
    file.write_text(json.dumps(line) + "\n" + file.read_text())
    begin = perf_counter()
    status, _, err = hybrid("report", run_folder)
    assert perf_counter() - begin < 20
    assert (status, "line 1: residual" in err, err.count("\n")) == (1, True, 1)
    assert len(err) < 2000
