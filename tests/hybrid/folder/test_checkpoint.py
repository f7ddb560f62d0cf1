"""Checkpoints: whole or not there, the same bits back, faults named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid import split
from hybrid.folder import checkpoint
from hybrid.networks import models
from hybrid.networks.blocks import Blocks
from tests.hybrid.folder.small_checkpoints import saved, trained


def optimizer_state(cut: Blocks, optimizers: Any) -> dict[str, Tensor]:
    found = {}
    for rank in range(len(cut)):
        for kind, optimizer in optimizers[rank].items():
            for name, parameter in cut.module(rank).named_parameters():
                for slot, value in optimizer.state[parameter].items():
                    found[f"{cut.module(rank).global_name(name)}:{kind}.{slot}"] = value
    return found


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("before", "after", "own"), [(3, 3, False), (2, 4, True), (4, 1, True)])
def test_weights_and_optimizer_state_come_back_bit_for_bit_on_any_number_of_blocks(
    tmp_path, before, after, own, name
) -> None:
    cut, optimizers, folder = saved(tmp_path, before, name=name, own=own)
    other, others = trained(after, 1, name, own)
    manifest = checkpoint.read_manifest(folder)
    for rank in range(after):
        checkpoint.restore(folder, manifest, other.units_of(rank), others[rank])
    expected = cut.model.state_dict()
    for key, value in other.model.state_dict().items():
        assert torch.equal(value, expected[key])
        assert value.stride() == expected[key].stride()
    state = optimizer_state(cut, optimizers)
    again = optimizer_state(other, others)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_a_units_file_holds_global_names(tmp_path) -> None:
    _, _, folder = saved(tmp_path)
    manifest = checkpoint.read_manifest(folder)
    names = checkpoint.load_unit(folder, manifest, "layer2.0")
    assert "layer2.0.conv1.weight" in names
    assert "layer2.0.conv1.weight..exact.momentum_buffer" in names
    assert sorted(manifest["units"]) == ["head", "layer1.0", "layer2.0", "layer3.0", "stem"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("checkpoints"))[2]


@given(st.data())
def test_a_flipped_bit_anywhere_is_found_and_its_file_named(whole: Path, data: Any) -> None:
    path = data.draw(st.sampled_from(sorted(whole.iterdir())))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    broken = bytearray(content)
    broken[position] ^= 1 << bit
    path.write_bytes(broken)
    try:
        with pytest.raises(ValueError, match="wrong checksum") as caught:
            checkpoint.load_model(whole, checkpoint.read_manifest(whole))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        path.write_bytes(content)


def test_another_format_is_refused_with_both_numbers(tmp_path) -> None:
    _, _, folder = saved(tmp_path)
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    body["format"] = 8
    text = json.dumps({**body, "sha256": checkpoint.digest(body)})
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=f"format 8; this version reads {checkpoint.FORMAT}"):
        checkpoint.read_manifest(folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    _, _, folder = saved(tmp_path)
    other = models.build("resnet8", 5, 1, 8)
    cut = split(other, 1)
    with pytest.raises(ValueError, match=r"fc\.weight, \(5, 64\) of torch\.float32: it is of"):
        checkpoint.restore(folder, checkpoint.read_manifest(folder), cut.units_of(0), {})
