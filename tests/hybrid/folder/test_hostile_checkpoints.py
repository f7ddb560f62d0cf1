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
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from hybrid import Trainer, data, models, split
from hybrid.folder import checkpoint
from hybrid.settings.config import CheckpointSettings, OptimizerSettings, TrainSettings
from solvers import Backprop

GUARDED = Path(__file__).parents[2] / "support" / "guarded_load.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of one step on two blocks."""
    out = tmp_path_factory.mktemp("runs") / "run"
    go_on(out, 1, resume=False)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def go_on(out: Path, epochs: int, resume: bool = True, optimizer: str = "sgd") -> None:
    train, test = data.load("digits")
    network = models.build("resnet8", 10, 1, 8)
    Trainer(
        split(network, cuts=["layer2.0"]),
        Backprop(),
        train=TrainSettings(batch_size=64, epochs=epochs, threads=1),
        optimizer=OptimizerSettings(name=optimizer),
        checkpoint=CheckpointSettings(keep_last=1),
        out=out,
        resume=resume,
        quiet=True,
    ).fit(train.take(64), test.take(10))


def newest(run: Path) -> Path:
    return checkpoint.complete(run / "checkpoints")[-1]


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest and give it a valid checksum, as anybody can."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    edit(body)
    path.write_text(json.dumps({**body, "sha256": checkpoint.digest(body)}))


def change_unit(folder: Path, name: str, content: bytes) -> None:
    """Put other bytes in a unit's file, with a valid checksum."""
    (folder / f"{name}.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    entry = {"file": f"{name}.safetensors", "sha256": digest, "bytes": len(content)}
    change(folder, lambda body: body["units"].update({name: entry}))


def fault(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        call(*arguments)
    assert str(caught.value).isprintable()
    return str(caught.value)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_model(folder, checkpoint.read_manifest(folder))


@pytest.mark.parametrize(
    "name",
    ["../../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0.safetensors", "x", 7],
)
def test_a_unit_s_file_lies_in_the_checkpoint(run, tmp_path, name) -> None:
    folder = newest(run)
    (tmp_path / "x.safetensors").write_bytes(save({"x": torch.zeros(1)}))
    change(folder, lambda body: body["units"]["stem"].update(file=name))
    assert "units.stem.file is " in fault(load, folder)


@pytest.mark.parametrize("which", ["stem.safetensors", "manifest.json"])
def test_a_link_in_a_checkpoint_is_not_followed(run, tmp_path, which) -> None:
    folder = newest(run)
    (folder / which).rename(tmp_path / which)
    (folder / which).symlink_to(tmp_path / which)
    assert f"{folder / which} is a link" in fault(load, folder)


@pytest.mark.timeout(20)
def test_a_pipe_in_a_checkpoint_is_not_waited_for(run) -> None:
    path = newest(run) / "stem.safetensors"
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is not a regular file" in fault(load, newest(run))


def test_a_folder_that_is_a_link_is_no_checkpoint(run, tmp_path) -> None:
    folder = newest(run)
    folder.rename(tmp_path / folder.name)
    folder.symlink_to(tmp_path / folder.name)
    assert checkpoint.complete(run / "checkpoints") == []


HEADER = b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,%s]}}'


def tensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


UNITS = {
    "no header": b"",
    "header of 16 EB": tensors(b"{}", length=2**64 - 1),
    "header of 1 GB": tensors(b"{}", length=1 << 30),
    "header of 99 MB": tensors(b"{}", length=99_000_000),
    "no JSON": tensors(b"x" * 100),
    "deep JSON": tensors(b"[" * 100_000),
    "shape beyond the data": tensors(HEADER % (b"1000000000", b"4000000000"), bytes(4)),
    "shape that overflows": tensors(HEADER % (b"4294967296,4294967296,4", b"0")),
    "offsets backwards": tensors(
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', bytes(4)
    ),
    "unknown dtype": tensors(b'{"x":{"dtype":"PYOBJ","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "pickle": b"\x80\x02cos\nsystem\nU\x0etouch /tmp/ran\x85R.",
}


def test_hostile_files_are_one_line_each_in_bounds_and_run_nothing(run, tmp_path) -> None:
    folders = {}
    for number, (name, content) in enumerate(UNITS.items()):
        folders[name] = Path(shutil.copytree(newest(run), tmp_path / str(number)))
        change_unit(folders[name], "stem", content)
    manifests = {
        "nested": b"[" * 50_000_000,
        "nested objects": b'{"a":' * 1_000_000,
        "larger than any": b" " * ((1 << 26) + 1),
        "a number of digits": b'{"sha256": ' + b"9" * 1_000_000 + b"}",
        "a list": b"[]",
        "nothing": b"",
    }
    for number, (name, content) in enumerate(manifests.items()):
        folders[name] = tmp_path / f"m{number}"
        folders[name].mkdir()
        (folders[name] / "manifest.json").write_bytes(content)
    command = [sys.executable, str(GUARDED), "checkpoint", *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(folders)
    for row in rows:
        assert row["error"].startswith(f"ValueError: {row['file']}/"), row
        assert row["error"].isprintable()
        assert (row["seen"], row["seconds"] < 20) == ([], True)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": True}, "step is True"),
        ({"step": 10**400}, "step is 1000"),
        ({"epoch": -3}, "epoch is -3"),
        ({"epoch": 10**6}, "is not within epoch 1000000"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
        ({"residual": ["x"]}, "residual.0 is 'x'"),
        ({"residual": []}, "2 blocks of 1 replicas have"),
        ({"totals": []}, "2 blocks of 1 replicas have"),
        ({"totals": [{}, {"images": None}]}, "totals.1.images is None"),
        ({"totals": [{}, {"images": float("inf")}]}, "totals.1.images is inf"),
        ({"residual": [float("nan")]}, "residual.0 is nan"),
        ({"rollbacks": {}}, "rollbacks is {}"),
        ({"shared": None}, "shared is None"),
        ({"units": []}, "units is []"),
        ({"units": {"stem": None}}, "units.stem is None"),
        ({"states": None}, "states is None"),
        ({"cuts": "layer2.0"}, "cuts is 'layer2.0'"),
        ({"tested": {"a": "\x1b[2J"}}, "tested.a is '\\x1b[2J'"),
        ({"model": 5}, "model is 5"),
    ],
    ids=str,
)
def test_a_manifest_of_impossible_values_is_named_and_nothing_is_written(run, edit, said) -> None:
    change(newest(run), lambda body: body.update(edit))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    message = fault(go_on, run, 2)
    assert said in message
    assert str(newest(run) / "manifest.json") in message
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("key", ["step", "units", "states", "shared", "totals", "gaps", "format"])
def test_a_manifest_that_lacks_something_is_named(run, key) -> None:
    change(newest(run), lambda body: body.pop(key))
    assert "manifest.json" in fault(go_on, run, 2)


def altered(run: Path, key: str, value: torch.Tensor | None) -> None:
    folder = newest(run)
    content = load_file(folder / "stem.safetensors")
    content.pop(key, None)
    if value is not None:
        content[key] = value
    change_unit(folder, "stem", save(content))


MOMENTUM = "conv1.weight:exact.momentum_buffer"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "conv1.weight",
            torch.zeros(16, 1, 3),
            "holds (16, 1, 3) of torch.float32 where the model has conv1.weight",
        ),
        ("conv1.weight", torch.zeros(16, 1, 3, 3, dtype=torch.complex64), "of torch.complex64"),
        ("conv1.weight", torch.zeros(16, 1, 3, 3, dtype=torch.int64), "of torch.int64"),
        ("conv1.weight", None, "holds nothing where the model has conv1.weight"),
        (MOMENTUM, torch.zeros(5), "momentum_buffer (5,) of conv1.weight, which has shape (16"),
        ("conv1.weight:exact.exp_avg", torch.zeros(16, 1, 3, 3), "but SGD keeps momentum_buffer"),
    ],
)
def test_tensors_that_do_not_fit_are_named(run, key, value, said) -> None:
    altered(run, key, value)
    assert said in fault(go_on, run, 2)


def test_weights_that_are_not_finite_are_one_line(run) -> None:
    altered(run, "conv1.weight", torch.full((16, 1, 3, 3), torch.nan))
    assert "not finite" in fault(go_on, run, 2)


def test_a_run_goes_on_with_its_own_optimizer_only(run) -> None:
    message = fault(lambda: go_on(run, 2, optimizer="adamw"))
    assert "momentum_buffer" in message
    assert "AdamW keeps exp_avg, exp_avg_sq, step: resume with the optimizer" in message


def test_what_was_not_tampered_with_goes_on(run) -> None:
    go_on(run, 2)
    assert json.loads((newest(run) / "manifest.json").read_text())["epoch"] == 2
