"""Assistants over any input: what they compute, what they are refused for, and that any grid and
any resume has the same ones."""

from itertools import cycle

import pytest
import torch
from answers import output, refusal
from setting_modes import EXACT, Mode
from torch import nn
from trainings import assert_same, digits, newest, trained_weights, trainer, weights

from hybrid.data.mapped import Mapped
from hybrid.folder import checkpoint
from hybrid.registries import SAMPLERS
from hybrid.solvers import DDG, Backprop
from hybrid_samplers import AutoAssist
from hybrid_samplers.assistants import ROWS, Assistant, Logistic
from tests import test_settings_act as act
from tests.hybrid.data.samplers import test_every_sampler as every

pytestmark = pytest.mark.skipif(
    "auto-assist" not in SAMPLERS, reason="the package is installed without its entry points"
)
NARROW = "sampler_assistants:narrow"
OWN = AutoAssist(lag=2, assistant=NARROW, optimizer="adamw", lr=0.01)


@pytest.fixture(scope="module")
def few():
    return digits(6)


class Sentences:
    """Tokens and a class; large tokens have large losses."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randint(0, 40_000, (5,), generator=generator), i % 3


def test_tokens_are_a_bag_of_words_and_a_class():
    data = Mapped(Sentences())
    choice = AutoAssist(gamma=0.25, lr=0.3, decay=0.05).start(data, 0)
    tokens = torch.stack([Sentences()[i][0] for i in range(64)])
    classes = torch.arange(64) % 3
    x = torch.zeros(64, ROWS, dtype=torch.float64)
    x.scatter_add_(1, tokens % ROWS, torch.full((64, 5), 5**-0.5, dtype=torch.float64))
    u = torch.zeros(ROWS, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    total = number = 0.0
    for step in range(4):
        ids = torch.arange(16 * step, 16 * step + 16)
        losses = torch.rand(16, generator=torch.Generator().manual_seed(step))
        total, number = 0.75 * total + losses.double().sum(), 0.75 * number + 16
        worth = (losses > total / number).double()
        score = x[ids] @ u + b[classes[ids]]
        loss = nn.functional.binary_cross_entropy_with_logits(score, worth)
        loss = loss + 0.05 / 2 * (u**2).sum()
        with torch.no_grad():
            for parameter, g in zip((u, b), torch.autograd.grad(loss, (u, b)), strict=True):
                parameter -= 0.3 * g
        choice.learn(ids, losses)
    a = torch.sigmoid(x @ u + b[classes]).detach()
    torch.testing.assert_close(choice.probabilities(torch.arange(64)), 0.25 + 0.75 * a)
    assert a.std() > 0.001


def test_inputs_of_several_kinds_are_summed():
    inputs = {"a": torch.randn(4, 2, 3), "b": torch.arange(4), "c": torch.randn(4) + 1j}
    targets = torch.randn(4, 2)
    module = Logistic(inputs, targets)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.cat([inputs["a"].flatten(1), torch.view_as_real(inputs["c"])], 1).double()
    expected = x @ module.w[0] + module.u[inputs["b"], 0]
    torch.testing.assert_close(module(inputs, targets), expected)


def assistant(name, optimizer="sgd", seed=0):
    sample = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
    return Assistant(name, sample, seed, optimizer, 0.01, 1e-3)


def test_a_users_module_depends_on_the_seed_alone_and_goes_on_from_its_state():
    x, y, worth = torch.randn(3, 8, 1, 8, 8), torch.arange(8), torch.arange(8) % 2
    torch.manual_seed(1)
    whole = assistant(NARROW, "adamw")
    torch.manual_seed(2)
    first, other = assistant(NARROW, "adamw"), assistant(NARROW, "adamw", seed=1)
    assert not torch.equal(whole.predict(x[0], y), other.predict(x[0], y))
    for each in x:
        whole.learn(each, y, worth)
    first.learn(x[0], y, worth)
    again = assistant(NARROW, "adamw")
    again.load_state(first.state())
    for each in x[1:]:
        again.learn(each, y, worth)
    assert torch.equal(whole.predict(x[0], y), again.predict(x[0], y))
    assert {*whole.state()} >= {"steps", "module body.2.running_mean", "optimizer 0 exp_avg"}
    assert torch.initial_seed() == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("columns", r"gives \(2, 1\) of torch.float32 for 2 samples: it must be a real number"),
        ("whole_numbers", r"gives \(2,\) of torch.int64 for 2 samples"),
        ("numbers", "gave a float, not a torch Tensor: return one"),
        ("broken", "failed: RuntimeError: no assistant"),
        ("nothing", "gave a NoneType, not a torch Module: return one"),
        ("frozen", "has no parameter to train: give it one"),
        ("narow", "has no narow; did you mean 'narrow'"),
    ],
)
def test_what_is_no_assistant_is_refused_in_one_line(name, said):
    with pytest.raises(
        ValueError, match=rf"^sampler.assistant=sampler_assistants:{name}\b.*{said}"
    ):
        assistant(f"sampler_assistants:{name}")


def test_the_state_of_another_assistant_is_refused():
    saved = assistant("logistic").state()
    assert "of another assistant than" in refusal(assistant(NARROW).load_state, saved)
    saved["module b"] = saved["module b"].float()
    assert "it must be (16384) of torch.float64" in refusal(assistant("logistic").load_state, saved)
    assert "must be logistic, or your" in refusal(AutoAssist, assistant="logistics")


def test_the_choice_of_a_users_module_is_that_of_one_rank_on_any_grid(few):
    on_one_block = every.train(few, Backprop(), sampler=OWN, blocks=1)
    every.test_the_choice_depends_on_no_grid(OWN, on_one_block, few)
    every.test_replicas_choose_as_one_chain_that_accumulates(OWN, few)
    logistic = every.train(few, Backprop(), sampler=AutoAssist(lag=2), blocks=1)
    assert any(not torch.equal(logistic[name], on_one_block[name]) for name in logistic)


@pytest.mark.parametrize("stopped", [6, 8])
def test_a_run_with_a_users_module_goes_on(stopped, few, tmp_path, monkeypatch):
    """Between two epochs and in the second one, on another number of blocks."""
    every.test_resumed_is_uninterrupted(Backprop(), OWN, 3, stopped, {}, few, tmp_path, monkeypatch)
    folder = newest(tmp_path / "run")
    manifest = checkpoint.read_manifest(folder)
    states = [checkpoint.load_state(folder, manifest, name) for name in manifest["states"]]
    names = {name for state in states for name in state}
    assert any(name.endswith("module out.weight") for name in names)
    assert any(name.endswith("optimizer 0 exp_avg") for name in names)


def test_a_users_module_chooses_the_same_under_mpirun_and_runs_if_the_command_says_so(
    world, tmp_path, few
):
    """Two blocks and two replicas; processes take seconds to start."""
    out = tmp_path / "run"
    flags = ["sampler.name=auto-assist", "sampler.lag=2", "sampler.optimizer=adamw"]
    flags += ["train.threads=1", "data.limit=192", f"sampler.assistant={NARROW}"]
    words = [word for flag in flags for word in ("--set", flag)]
    run = ("train", "--epochs", 2, "--batch-size", 32, "--solver", "ddg", "--replicas", 2, *words)
    output(world.hybrid(4, *run, "--out", out))
    made = trainer(DDG(), sampler=OWN, replicas=2)
    assert_same(weights(out), trained_weights(made, (few[0], digits()[1])))


def test_every_setting_of_the_samplers_acts_or_is_refused():
    """Few losses, known soon, to an assistant that learns fast from them."""
    soon = {"sampler.lag": 2, "train.epochs": 3}
    same = dict.fromkeys(EXACT, "gradients are exact")
    assist = {**soon, "sampler.name": "auto-assist", "sampler.lr": 5.0}
    window = {"solver.beta": 0.1, "solver.return_ratio": 1e9, "rounds.window": 2}
    modes = [
        Mode("backprop", "auto-assist", assist, same),
        Mode("augmented-lagrangian", "auto-assist", {**window, **assist}),
        Mode("backprop", "selective", {**soon, "sampler.name": "selective-backprop"}, same),
    ]
    for mode in modes:
        ours = [s for s in sorted(act.settings_of(mode)) if s.startswith("sampler.")]
        assert not act.faults(zip(ours, cycle([mode]), strict=False))
