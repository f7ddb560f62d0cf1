"""A checkpoint of unknown origin: one line, bounded, no file but its own, nothing run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from answers import refusal
from safetensors.torch import load_file, save
from trainings import digits, interrupted, newest, refused, trainer

from hybrid import Trainer
from hybrid.folder import checkpoint
from hybrid.solvers import BlockADMM

GUARDED = Path(__file__).with_name("guarded_load.py")


def made(out: Path, **more: Any) -> Trainer:
    """Of block-admm over all mini-batches, which keeps Z and U, and corrects in the first epoch."""
    rounds = {"window": "all", "correct_every": 2, "sweeps": 2}
    return trainer(BlockADMM(), out, **rounds, **more)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two blocks after one epoch of two."""
    out = tmp_path_factory.mktemp("runs") / "run"
    made(out).fit(*digits(2))
    interrupted(out, after=1)
    return out


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def quickly_refused(run: Path) -> str:
    begin = process_time()
    said = refused(made(run, resume=True), digits(2))
    assert process_time() - begin < 20
    assert said.isprintable()
    return said


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest and give it a valid checksum, as anybody can."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    edit(body)
    path.write_text(json.dumps({**body, "sha256": checkpoint.digest(body)}))


def replace(folder: Path, kind: str, name: str, content: bytes) -> None:
    """Put other bytes in the file of a unit or of a cut, with a valid checksum."""
    file = folder / checkpoint.read_manifest(folder)[kind][name]["file"]
    file.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    entry = {"file": file.name, "sha256": digest, "bytes": len(content)}
    change(folder, lambda body: body[kind].update({name: entry}))


def fault(folder: Path) -> str:
    """What is said of a checkpoint whose weights are loaded."""
    said = refusal(lambda: checkpoint.load_model(folder, checkpoint.read_manifest(folder)))
    assert said.isprintable()
    return said


@pytest.mark.parametrize(
    "name",
    ["../../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0.safetensors", "x", 7],
)
def test_a_unit_s_file_lies_in_the_checkpoint(run, tmp_path, name) -> None:
    folder = newest(run)
    (tmp_path / "x.safetensors").write_bytes(save({"x": torch.zeros(1)}))
    change(folder, lambda body: body["units"]["stem"].update(file=name))
    assert "units.stem.file is " in fault(folder)


def test_a_folder_that_is_a_link_is_no_checkpoint(run, tmp_path) -> None:
    folder = newest(run)
    folder.rename(tmp_path / folder.name)
    folder.symlink_to(tmp_path / folder.name)
    assert folder not in checkpoint.complete(run / "checkpoints")


HEADER = b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,%s]}}'


def tensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


UNITS = {
    "no header": b"",
    "header of 16 EB": tensors(b"{}", length=2**64 - 1),
    "deep JSON": tensors(b"[" * 100_000),
    "shape beyond the data": tensors(HEADER % (b"1000000000", b"4000000000"), bytes(4)),
    "shape that overflows": tensors(HEADER % (b"4294967296,4294967296,4", b"0")),
    "unknown dtype": tensors(b'{"x":{"dtype":"PYOBJ","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "pickle": b"\x80\x02cos\nsystem\nU\x0etouch /tmp/ran\x85R.",
}


def test_hostile_files_are_one_line_each_in_bounds_and_run_nothing(run, tmp_path) -> None:
    folders = {}
    for number, (name, content) in enumerate(UNITS.items()):
        folders[name] = Path(shutil.copytree(newest(run), tmp_path / str(number)))
        replace(folders[name], "units", "stem", content)
    manifests = {
        "nested": b"[" * 50_000_000,
        "larger than any": b" " * ((1 << 26) + 1),
        "a list": b"[]",
        "nothing": b"",
    }
    for number, (name, content) in enumerate(manifests.items()):
        folders[name] = tmp_path / f"m{number}"
        folders[name].mkdir()
        (folders[name] / "manifest.json").write_bytes(content)
    command = [sys.executable, str(GUARDED), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(folders)
    for row in rows:
        assert row["error"].startswith(f"ValueError: {row['file']}/"), row
        assert row["error"].isprintable()
        assert (row["seen"], row["seconds"] < 20) == ([], True)


KEYS = ("step", "units", "states", "shared", "totals", "local_budget", "format")


def lacking(key: str, body: dict[str, Any]) -> None:
    del body[key]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 10**400}, "step is 1000"),
        ({"epoch": 10**6}, "is not within epoch 1000000"),
        ({"residual": ["x"]}, "residual.0 is 'x'"),
        ({"totals": []}, "2 blocks of 1 replicas have"),
        ({"residual": [float("nan")]}, "residual.0 is nan"),
        ({"shared": None}, "shared is None"),
        ({"local_budget": [[1, 2**21]]}, "local_budget.0.1 is 2097152"),
        ({"tested": {"a": "\x1b[2J"}}, "tested.a is '\\x1b[2J'"),
        *((partial(lacking, key), "") for key in KEYS),
    ],
    ids=lambda given: f"without {given.args[0]}" if callable(given) else str(given),
)
def test_a_manifest_of_impossible_values_is_named_and_nothing_is_written(run, edit, said) -> None:
    change(newest(run), edit if callable(edit) else lambda body: body.update(edit))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    message = quickly_refused(run)
    assert said in message
    assert str(newest(run) / "manifest.json") in message
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


MOMENTUM = "conv1.weight..exact.momentum_buffer"
CUT = "cut before layer2.0"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "conv1.weight",
            torch.zeros(16, 1, 3),
            "holds (16, 1, 3) of torch.float32 where the model has conv1.weight",
        ),
        ("conv1.weight", torch.zeros(16, 1, 3, 3, dtype=torch.int64), "of torch.int64"),
        ("conv1.weight", None, "holds nothing where the model has conv1.weight"),
        (MOMENTUM, torch.zeros(5), "momentum_buffer (5,) of conv1.weight, which has shape (16"),
        ("conv1.weight..exact.exp_avg", torch.zeros(16, 1, 3, 3), "but SGD keeps momentum_buffer"),
    ],
)
def test_tensors_that_do_not_fit_are_named(run, key, value, said) -> None:
    alter(run, "units", "stem", lambda tensors: tensors.update({key: value}))
    assert said in quickly_refused(run)


def test_weights_that_are_not_finite_are_one_line(run) -> None:
    spoilt = {"conv1.weight": torch.full((16, 1, 3, 3), torch.nan)}
    shutil.rmtree(run / "checkpoints" / "00000000")  # which a roll-back would take
    alter(run, "units", "stem", lambda tensors: tensors.update(spoilt))
    assert "not finite" in quickly_refused(run)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop("program/kappa_in"),
        lambda tensors: tensors.pop("program/lam"),
        lambda tensors: tensors.update({"program/lam": tensors["program/lam"][:, :3].clone()}),
    ],
    ids=["no kappa", "no lam", "other channels"],
)
def test_kept_variables_that_do_not_fit_are_one_line(edit, run) -> None:
    alter(run, "states", CUT, edit)
    assert "holds states that this run cannot restore" in quickly_refused(run)


def alter(run: Path, kind: str, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a file of the newest checkpoint; None takes one away."""
    folder = newest(run)
    entry = checkpoint.read_manifest(folder)[kind][name]
    tensors: dict[str, Any] = load_file(folder / entry["file"])
    edit(tensors)
    left = {key: value for key, value in tensors.items() if value is not None}
    replace(folder, kind, name, save(left))


@pytest.mark.parametrize("size", [100 * 2**30, 2**40])
@pytest.mark.parametrize(("kind", "name"), [("units", "stem"), ("states", CUT)])
def test_a_file_that_claims_to_be_huge_is_not_read(kind, name, size, run) -> None:
    """Sparse, so it takes no room; its manifest agrees with it."""
    folder = newest(run)
    os.truncate(folder / checkpoint.read_manifest(folder)[kind][name]["file"], size)
    change(folder, lambda body: body[kind][name].update(bytes=size))
    said = quickly_refused(run)
    assert f"{size} bytes" in said
    assert "more than" in said
