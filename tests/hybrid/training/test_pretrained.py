"""Models of transformers, from their checkpoints and to them: equal bits, on threads and ranks."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from answers import assert_one_line, output, refusal
from misused import fit, layers
from safetensors.torch import load_file
from trainings import assert_same
from zoo_packages import installed

import hybrid as package
from hybrid.folder import checkpoint
from hybrid.weights import write
from tests.hybrid.training import pretrained_program as program

KINDS = {"bert": 2, "gpt2": 2, "tied": 1}
CLASSES = {"bert": "BertForSequenceClassification", "gpt2": "GPT2LMHeadModel"}
transformers = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """By kind, the folder of a checkpoint in shards, and the weights of a training from it."""
    known = {}

    def of(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind) / "pretrained"
            model = program.make(kind)
            model.save_pretrained(folder, max_shard_size=200_000)
            trainer = program.trainer(kind, KINDS[kind], model=model)
            trainer.fit(program.Items(kind))
            known[kind] = folder, program.digests(model.state_dict())
        return known[kind]

    return of


def from_pretrained(kind, folder):
    name = CLASSES.get(kind, CLASSES["gpt2"])
    return getattr(program.package("transformers"), name).from_pretrained(folder)


def outputs(model):
    with torch.no_grad():
        return model.eval()(**program.INPUTS).logits


@transformers
@pytest.mark.parametrize("kind", KINDS)
def test_on_threads_weights_come_from_a_checkpoint_and_go_to_one(pretrained, tmp_path, kind):
    folder, expected = pretrained(kind)
    trainer = program.trainer(kind, KINDS[kind], folder, out=tmp_path / "run")
    trainer.fit(program.Items(kind))
    trained = trainer.blocks.model
    assert program.digests(trained.state_dict()) == expected
    trained.save_pretrained(tmp_path / "saved")
    make = partial(program.make, kind)
    for shards in (None, 2e-4):  # the second export replaces the first
        package.export(tmp_path / "run", tmp_path / "exported", make, shard_gb=shards)
        again = from_pretrained(kind, tmp_path / "exported")
        assert torch.equal(outputs(again), outputs(trained))
        assert program.digests(again.state_dict()) == expected
    for name in ("config.json", *(["generation_config.json"] if kind != "bert" else [])):
        same = [(tmp_path / made / name).read_text() for made in ("saved", "exported")]
        assert same[0] == same[1]
    listed = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in listed["weight_map"]) == (kind == "gpt2")
    assert not list(tmp_path.glob(".exported*"))


@transformers
def test_an_evaluation_reads_them_and_a_run_is_loaded_into_a_model_without_weights(
    pretrained, tmp_path
):
    folder, _ = pretrained("tied")
    trainer = program.trainer("tied", 1, folder, out=tmp_path / "run")
    items = program.Items("tied")
    assert trainer.evaluate(items) == program.trainer("tied", 1).evaluate(items)
    trainer.fit(items)
    with package.without_weights():
        empty = program.make("tied")
    for model in (empty, lambda: program.make("tied")):
        again = package.load(tmp_path / "run", model)
        assert again.lm_head.weight is again.transformer.wte.weight
        assert_same(again.state_dict(), trainer.blocks.model.state_dict())


@transformers
@pytest.mark.parametrize("kind", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_rank_reads_and_holds_the_weights_of_its_own_block(world, pretrained, tmp_path, kind):
    folder, expected = pretrained(kind)
    out = tmp_path / "run"
    ranks = world.run(2, "tests.hybrid.training.pretrained_program:on_ranks", kind, folder, out)
    assert {name: x for found, _, _ in ranks for name, x in found.items()} == expected
    assert all(own <= held <= own + 4 * 100 for _, held, own in ranks)
    package.export(out, tmp_path / "exported", partial(program.make, kind))
    again = from_pretrained(kind, tmp_path / "exported")
    assert program.digests(again.state_dict()) == expected


@transformers
def test_the_command_trains_evaluates_and_exports_from_a_checkpoint(
    world, hybrid, pretrained, tmp_path
):
    folder, expected = pretrained("gpt2")
    own = [
        f"--{x}=tests.hybrid.training.pretrained_program:{y}"
        for x, y in (("model", "gpt2"), ("data", "data"))
    ]
    loss, out = "--loss=tests.hybrid.training.pretrained_program:loss", tmp_path / "run"
    words = ("--solver=backprop", "--epochs=1", "--batch-size=4", "--lr=0.05", "--out", out)
    threads = "--set=train.threads=1"
    said = world.hybrid(2, "train", *own, loss, *words, threads, "--weights", folder)
    assert said[0] == 0, said
    tested = json.loads((out / "summary.json").read_text())["test_loss"]
    assert f"test loss {tested:.4g}  (" in output(hybrid("evaluate", out, *own, loss))
    output(hybrid("export", out, tmp_path / "exported", own[0]))
    again = from_pretrained("gpt2", tmp_path / "exported")
    assert program.digests(again.state_dict()) == expected
    missing = hybrid("train", *own, loss, *words[:-1], tmp_path / "no", "--weights", tmp_path / "x")
    assert_one_line(missing, f"weights {tmp_path / 'x'}: there is no such file or folder")


@pytest.fixture
def run(tmp_path):
    fit(tmp_path / "run")
    return tmp_path / "run"


def test_any_network_has_a_folder_and_a_file_of_its_state_dict(run, tmp_path):
    model = package.load(run, layers)
    for arguments in ((), (layers,)):
        package.export(run, tmp_path / "folder", *arguments, shard_gb=1e-6)
        files = sorted((tmp_path / "folder").glob("*.safetensors"))
        found = {name: x for file in files for name, x in load_file(file).items()}
        assert len(files) > 1
        assert_same(found, model.state_dict())
    package.export(run, tmp_path / "model.safetensors")
    again = layers()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(again.state_dict(), model.state_dict())


def test_another_target_is_refused_and_stays_as_it_is(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "tokenizer.json").write_text("{}")
    (tmp_path / "link").symlink_to(theirs)
    export = partial(refusal, package.export, run)
    assert "is a file where a folder must be" in export(tmp_path / "file")
    assert "has tokenizer.json in it, which would be lost" in export(theirs)
    assert "is a link to" in export(tmp_path / "link")
    assert "is one file of weights, without shards" in export(tmp_path / "m.safetensors", layers)
    for size in (0, -1, float("inf"), float("nan")):
        assert f"shard_gb is {size:g}: it must be" in export(tmp_path / "new", shard_gb=size)
    assert "is not of the model that model= describes" in export(
        tmp_path / "new", lambda: torch.nn.Linear(2, 2)
    )
    assert "model gave a int, not a torch.nn.Module" in export(tmp_path / "new", lambda: 3)
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "run", "theirs"]
    assert os.listdir(theirs) == ["tokenizer.json"]


def test_a_failure_leaves_the_older_export_and_nothing_else(run, tmp_path, monkeypatch):
    target = tmp_path / "exported"
    package.export(run, target)
    before = (target / "model.safetensors").read_bytes()

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(f"{write.__module__}.write_durably", full)
        with pytest.raises(OSError, match="No space left"):
            package.export(run, target)

    class Saving(torch.nn.Sequential):
        def save_pretrained(self, folder, max_shard_size):
            (folder / "model.safetensors").write_bytes(b"half")
            raise RuntimeError("out of\nluck")

    said = refusal(package.export, run, target, lambda: Saving(*layers()))
    assert "Saving.save_pretrained failed: RuntimeError: out of luck" in said
    newest = checkpoint.complete(run / "checkpoints")[-1]
    next(newest.glob("*.safetensors")).unlink()
    assert "is missing" in refusal(package.export, run, target)
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["exported", "run"]
