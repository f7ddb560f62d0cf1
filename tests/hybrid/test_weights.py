"""Weights in files of others: what is read, written and refused, and modules made without them."""

import json
from pathlib import Path

import pytest
import torch
from answers import refusal
from safetensors.torch import save_file
from torch import nn
from trainings import assert_same

from hybrid import split, without_weights
from hybrid.networks.local_init import read_weights
from hybrid.weights import INDEX, Weights, find_names, write


class Base(nn.Module):
    """It has what transformers' models have: tables, tied weights, and a name of its own."""

    base_model_prefix = "base"

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(4, 6), nn.Linear(6, 4)
        self.again = self.out
        self.register_buffer("table", torch.arange(4).float() / 3, persistent=False)
        self.register_buffer("count", torch.tensor(7))
        nn.init.trunc_normal_(self.embed.weight)

    def forward(self, x):
        return self.again(self.embed(x + self.table))


class Headed(nn.Module):
    base_model_prefix = "base"

    def __init__(self):
        super().__init__()
        self.base, self.head = Base(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.base(x))


def of_base():
    """The tensors of a file, a tied one by one of its names."""
    torch.manual_seed(1)
    state = Base().state_dict()
    return {n: x.clone() for n, x in state.items() if not n.startswith("again")}


def of_headed():
    return {f"base.{n}": x for n, x in of_base().items()} | {
        "head.weight": torch.ones(2, 4),
        "head.bias": torch.ones(2),
    }


def saved(folder, tensors, name="model.safetensors"):
    save_file(tensors, folder / name)
    return folder


def read(model, path):
    """The model with the weights that are there."""
    blocks = split(model, 1, weights=path)
    read_weights(blocks, [0])
    return model


def test_a_module_without_weights_has_its_tables_and_ties_and_its_file_gives_it_the_rest(tmp_path):
    saved(tmp_path, of_base())
    state = torch.get_rng_state()
    with without_weights(), torch.device("meta"):
        model = Base()
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert all(p.is_meta for p in model.parameters())
    assert model.again.weight is model.out.weight
    assert torch.equal(model.table, Base().table)
    assert torch.equal(model.count, torch.tensor(7))
    read(model, tmp_path)
    assert model.again.weight is model.out.weight
    whole = Base()
    whole.load_state_dict(of_base(), strict=False)
    assert_same(model.state_dict(), whole.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(model(x), whole(x))


def test_a_block_reads_its_own_tensors_alone(tmp_path):
    tensors = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4))).state_dict()
    write(tmp_path, tensors, most=200_000)
    with without_weights():
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))
    blocks = split(model, cuts=["2"], weights=tmp_path / INDEX)
    for file in {blocks.pending.weights.files[name] for name in ("0.weight", "1.weight")}:
        file.unlink()
    read_weights(blocks, [1])
    assert torch.equal(model[3].weight, tensors["3.weight"])
    assert not model[0].weight.any()
    assert blocks.pending.waiting == {f"{n}.{kind}" for n in "01" for kind in ("weight", "bias")}
    model[3].weight.data.zero_()
    read_weights(blocks, [1])  # a second time nothing is
    assert not model[3].weight.any()


def test_numbers_become_those_of_the_network(tmp_path):
    half = {n: x.bfloat16() if x.is_floating_point() else x for n, x in of_base().items()}
    model = read(Base(), saved(tmp_path, half))
    assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model.embed.weight, half["embed.weight"].float())


@pytest.mark.parametrize("number_format", ["int8", "complex64"])
def test_numbers_of_another_kind_are_refused(tmp_path, number_format):
    made = of_base()
    made["embed.weight"] = made["embed.weight"].to(getattr(torch, number_format))
    said = refusal(find_names, Weights(saved(tmp_path, made)), Base())
    assert "'embed.weight' is " in said
    assert "in Base torch.float32" in said


def test_a_file_with_nan_or_with_more_than_the_format_holds_is_named(tmp_path):
    for value, model in ((float("nan"), Base()), (1e30, Base().half())):
        made = of_base()
        made["embed.weight"][1, 1] = value
        said = refusal(read, model, saved(tmp_path, made))
        assert f"{tmp_path / 'model.safetensors'}: 'embed.weight' has nan or inf" in said


def test_a_base_is_found_with_and_without_its_prefix(tmp_path):
    saved(tmp_path, of_headed())
    assert torch.equal(read(Base(), tmp_path).embed.weight, of_base()["embed.weight"])
    (tmp_path / "base").mkdir()
    saved(tmp_path / "base", of_base())
    said = refusal(find_names, Weights(tmp_path / "base"), Headed())
    assert "it lacks 2 of 9 tensors ('head.weight'); give" in said


def test_old_names_that_a_class_ignores_are_ignored(tmp_path):
    saved(tmp_path, of_base() | {"table": torch.zeros(4), "embed.masked": torch.zeros(1)})
    assert "it has 1 others ('embed.masked')" in refusal(find_names, Weights(tmp_path), Base())
    model = Base()
    model._keys_to_ignore_on_load_unexpected = [r"embed\.masked"]
    assert torch.equal(read(model, tmp_path).table, Base().table)


FAULTS = {
    "a shape": (of_base() | {"out.bias": torch.zeros(3)}, "'out.bias' has shape (3,), and in Base"),
    "a name": ({**of_base(), "x": torch.ones(1)}, "it has 1 others ('x')"),
    "too few": ({"count": torch.tensor(1)}, "it lacks 6 of 7 tensors ('embed.weight')"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_of_another_network_are_refused_before_anything_is_read(tmp_path, fault):
    tensors, said = FAULTS[fault]
    assert said in refusal(split, Base(), 1, weights=saved(tmp_path, tensors))


def test_what_is_no_safetensors_file_or_folder_is_refused(tmp_path):
    assert "there is no such file or folder" in refusal(Weights, tmp_path / "none")
    assert "the folder has no safetensors file" in refusal(Weights, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"code")
    assert "pytorch_model.bin, which is code" in refusal(Weights, tmp_path)
    assert "it is no safetensors file" in refusal(Weights, tmp_path / "pytorch_model.bin")
    assert "/proc/self/mem: it cannot be read (" in refusal(Weights, Path("/proc/self/mem"))
    saved(tmp_path, of_base(), "a.safetensors")
    assert Weights(tmp_path).files.keys() == of_base().keys()
    saved(tmp_path, of_base(), "b.safetensors")
    assert "it has 2 files *.safetensors: name one" in refusal(Weights, tmp_path)
    index = tmp_path / INDEX
    for text in ("[", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}'):
        index.write_text(text)
        assert "it is no index of safetensors files" in refusal(Weights, tmp_path)
    index.write_text(json.dumps({"weight_map": {"embed.bias": "a.safetensors", "z": "gone"}}))
    assert "gone: there is no such file" in refusal(Weights, tmp_path)
    index.write_text(json.dumps({"weight_map": {"z": "a.safetensors"}}))
    assert "1 tensors that it lists, 'z' first, are not in its files" in refusal(Weights, tmp_path)


@pytest.mark.parametrize("most", [10**6, 1], ids=["one file", "shards"])
def test_one_weight_under_two_names_with_unlike_values_is_refused(most, tmp_path):
    tensors = of_base() | {f"again.{n}": of_base()[f"out.{n}"] for n in ("weight", "bias")}
    for folder in (alike := tmp_path / "alike", unlike := tmp_path / "unlike"):
        folder.mkdir()
    write(alike, tensors, most)
    assert torch.equal(read(Base(), alike).again.weight, tensors["out.weight"])
    tensors["again.weight"] = tensors["again.weight"].clone()
    tensors["again.weight"][-1, -1] += 1e-3
    write(unlike, tensors, most)
    said = refusal(find_names, Weights(unlike), Base())
    assert "'out.weight' and 'again.weight' have unlike values" in said
