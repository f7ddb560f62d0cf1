"""Adapters of peft's in blocks: gradients of a plain loop, and runs without the frozen base."""

import shutil
from functools import partial
from itertools import product

import pytest
import torch
from answers import assert_one_line, output, refusal
from safetensors.torch import load_file
from torch.func import functional_call
from trainings import assert_same, interrupted, newest, weights
from zoo_packages import installed

import hybrid as package
from hybrid.data.sampling import epoch_order
from hybrid.folder import checkpoint
from hybrid.solvers import DDG, Backprop
from tests.hybrid.training import lora_program as program
from tests.hybrid.training.lora_program import BATCH, IDS, LR, SAMPLES, adapted, base, trained

pytestmark = pytest.mark.skipif(
    not (installed("peft") and installed("transformers")), reason="needs peft"
)
LATE = {"layers_to_transform": [2, 3], "target_modules": ["q_proj", "up_proj"]}
"""Adapters on the last two of four layers, so the first blocks train nothing."""
FAST = ("late layers", 4, "ddg"), ("gpt2, tied", 2, "backprop")
CASES = {"llama": ("llama", {}), "gpt2, tied": ("gpt2", {}), "late layers": ("llama", LATE)}
SOLVERS = {"backprop": Backprop(), "ddg": DDG(micro_batches=1)}


def loop(model, delays):
    """The state dict after plain SGD, with block k's forward pass d_k steps behind its steps.

    `delays`: name -> d of each trained parameter; 0: a plain loop. Mini-batch n goes forward at the
    weights after its first n - d steps.
    """
    torch.set_num_threads(1)
    model.train()
    versions = {name: [p.detach()] for name, p in model.named_parameters() if p.requires_grad}
    for n, ids in enumerate(epoch_order(0, 0, SAMPLES).split(BATCH)):
        used = {name: w[max(0, n - delays(name))].requires_grad_() for name, w in versions.items()}
        total = program.loss(functional_call(model, used, (IDS[ids],)), IDS[ids])
        for name, g in zip(used, torch.autograd.grad(total, [*used.values()]), strict=True):
            versions[name].append(versions[name][-1].detach() - LR * g)
    return {**model.state_dict(), **{name: w[-1].detach() for name, w in versions.items()}}


def layer(name):
    """The number of the layer in which a parameter is."""
    return next(int(part) for part in name.split(".") if part.isdecimal())


@pytest.mark.parametrize(
    ("case", "blocks", "name"),
    [
        pytest.param(*each, marks=() if each in FAST else pytest.mark.slow)
        for each in product(CASES, (2, 4), SOLVERS)
    ],
)
def test_blocks_step_on_the_gradients_of_a_loop_and_move_adapters_alone(case, blocks, name):
    (kind, settings), solver = CASES[case], SOLVERS[name]
    settings = {"layers": 4, **settings}

    def delay(name):
        return 0 if solver.exact else blocks - 1 - layer(name) * blocks // 4

    expected = loop(adapted(kind, **settings), delay)
    found = dict(trained(adapted(kind, **settings), blocks, solver).state_dict())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    before = adapted(kind, **settings)
    moved = {n for n, x in before.state_dict().items() if not torch.equal(x, found[n])}
    assert moved == {n for n, p in before.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_dropout_of_adapters_does_not_depend_on_the_cuts():
    found = [trained(adapted("llama", lora_dropout=0.3), blocks, Backprop()) for blocks in (1, 2)]
    assert_same(*(dict(model.state_dict()) for model in found))


def test_ranks_have_the_bits_of_threads(world):
    for solver in SOLVERS.values():
        ranks = world.run(2, "tests.hybrid.training.lora_program:on_ranks", "gpt2", solver)
        expected = program.digests(trained(adapted("gpt2"), 2, solver).state_dict())
        assert {name: x for named in ranks for name, x in named.items()} == expected


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Two epochs on two blocks."""
    out = tmp_path_factory.mktemp("lora") / "run"
    return out, trained(program.llama(), 2, Backprop(), epochs=2, out=out, **KEPT)


@pytest.fixture
def run(first_run, tmp_path):
    return shutil.copytree(first_run[0], tmp_path / "run"), first_run[1]


KEPT = {
    "checkpoint": {"keep_last": 0},
    "names": {"model": "tests.hybrid.training.lora_program:llama"},
}


def test_a_checkpoint_has_adapters_and_refers_to_the_frozen_weights(run):
    folder, model = run
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    assert weights(folder).keys() == trains
    manifest = checkpoint.read_manifest(newest(folder))
    assert manifest["frozen"].keys() == model.state_dict().keys() - trains
    for name, each in manifest["frozen"].items():
        assert each == checkpoint.reference(model.state_dict()[name])


@pytest.mark.parametrize(("blocks", "replicas"), [(2, 1), (1, 2)])
def test_a_resume_on_any_grid_takes_the_frozen_weights_of_the_network(run, blocks, replicas):
    folder, model = run
    interrupted(folder, after=1)
    again = partial(
        trained,
        blocks=blocks,
        replicas=replicas,
        solver=Backprop(),
        epochs=2,
        out=folder,
        resume=True,
        **KEPT,
    )
    said = refusal(partial(again, program.other_llama()))
    assert "other ones (base_model.model" in said
    found = again(program.llama()).state_dict()
    torch.testing.assert_close(dict(found), dict(model.state_dict()), rtol=0, atol=1e-14)
    assert checkpoint.read_manifest(newest(folder))["frozen"]


def test_a_run_is_loaded_evaluated_and_exported_with_the_base_alone(run, tmp_path, hybrid):
    folder, model = run
    assert_same(dict(package.load(folder, program.llama).state_dict()), dict(model.state_dict()))
    own = [
        f"--{x}=tests.hybrid.training.lora_program:{y}"
        for x, y in (("model", "llama"), ("data", "data"))
    ]
    expected = program.trainer(model, 1, Backprop()).evaluate(program.data()[1])["loss"]
    said = output(
        hybrid("evaluate", folder, *own, "--loss=tests.hybrid.training.lora_program:loss")
    )
    assert f"test loss {expected:.4g}  (" in said
    for name in ("loaded", "adapter.safetensors"):
        line = "leaves out 21 frozen weights"
        assert line in refusal(lambda name=name: package.export(folder, tmp_path / name))
    output(hybrid("export", folder, tmp_path / "adapter", own[0]))
    output(hybrid("export", folder, tmp_path / "adapter", own[0]))  # replaces the first
    assert not any(
        "base_layer" in n for n in load_file(tmp_path / "adapter/adapter_model.safetensors")
    )
    peft = program.package("peft")
    again = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)
    wrong = hybrid(
        "evaluate", folder, "--model=tests.hybrid.training.lora_program:other_llama", *own[1:]
    )
    assert_one_line(wrong, f"{newest(folder)} leaves out 21 frozen weights")
