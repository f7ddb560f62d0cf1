"""Any module by its calls: what is cut, what is kept whole, what is refused, and why."""

import re
from copy import deepcopy
from inspect import getsourcelines
from threading import Lock

import pytest
import torch
from answers import refusal
from small_networks import Characters, Masked, TwoHeads, UNet
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import assert_same

from hybrid import Trainer, TrainSettings, split
from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop
from tests.hybrid.networks.odd_modules import (
    Average,
    Doubling,
    Dropping,
    Noisy,
    Normed,
    Odds,
    OwnCounter,
    OwnFlow,
    Statements,
    Tied,
    Two,
    View,
)

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def run(blocks, inputs):
    """The blocks one after the other, on the network's own inputs."""
    made = blocks.with_bundles(inputs)
    value = made.pack_inputs(inputs)
    for index in range(len(made)):
        value = made.module(index)(value)
    return value


def names(blocks):
    """Of all tensors of the blocks, in the whole model."""
    return sorted(
        {name for i in range(len(blocks)) for u in blocks.units_of(i) for name in u.tensors()}
    )


@pytest.mark.parametrize("kind", [Statements, Odds])
def test_the_blocks_compute_what_the_module_does_and_have_its_tensors(kind):
    model = kind()
    expected, before = kind()(X), sorted(vars(model))
    cut = split(model, 2, sample=X)
    assert cut.cuts == ["b"]
    assert torch.equal(run(cut, X), expected)
    assert names(cut) == sorted(model.state_dict())
    assert sorted(vars(model)) == before


@pytest.mark.parametrize(
    "between", [Doubling(), Dropping(), Average(), Average(True), Noisy(), nn.BatchNorm1d(4)]
)
def test_a_module_that_depends_on_numbers_is_kept_whole_and_a_split_changes_nothing(between):
    model = Two(between).eval()
    before = deepcopy(model.state_dict())
    cut = split(model, 2, sample=X)
    cut.with_bundles(X).find_random_modules(X)
    assert_same(model.state_dict(), before)
    assert not model.training
    for training in (True, False):
        cut.model.train(training)
        plain = deepcopy(cut.model)
        torch.manual_seed(1)
        expected = plain(X)
        torch.manual_seed(1)
        found = cut.module(1).train(training)(cut.module(0).train(training)(X))
        assert torch.equal(found, expected)
        cut.sync_buffers()
        pairs = zip(cut.model.buffers(), plain.buffers(), strict=True)
        assert all(torch.equal(buffer, other) for buffer, other in pairs)


LINE = getsourcelines(OwnFlow.forward)[1] + 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            OwnFlow,
            rf"before 'b': the code around it reads numbers .*line {LINE}. before, on",
        ),
        (OwnCounter, "forward writes to the buffer 'seen': move that code"),
        (View, "2 blocks asked of 1 units .*in-place operation: let that code create a new tensor"),
    ],
)
def test_what_the_models_own_forward_may_not_do_is_said(kind, said):
    model = kind()
    assert re.search(said, refusal(split, model, 2, sample=X))
    assert not any(b.any() for b in model.buffers())


SKIPS = {"bottom": [3, 1], "down2.3": [2, 2]}
"""By the first cut: tensors over both, what goes on and skips."""


def test_a_u_net_is_cut_by_the_names_of_its_modules():
    torch.manual_seed(0)
    model = UNet(3).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 1, 16, 16)
    for cuts in (["bottom", "up1"], ["down2.3", "wider1"]):
        cut = split(model, cuts=cuts, sample=x)
        assert cut.cuts == cuts
        crossing = [cut.with_bundles(x).units_of(index)[0].bundle for index in (1, 2)]
        assert [1 if b is None else len(b.shapes) for b in crossing] == SKIPS[cuts[0]]
        assert torch.equal(run(cut, x), model(x))
    assert "no cut before 'botom' in UNet" in refusal(split, model, cuts=["botom"], sample=x)


def test_a_sample_that_does_not_fit_is_refused():
    said = refusal(split, UNet(3), 2, sample=torch.zeros(4, 2, 16, 16))
    assert "sample of shape (2, 16, 16) does not fit " in said
    assert "to have 1 channels, but got 2 channels" in said


def test_several_inputs_go_in_by_name_or_position():
    torch.manual_seed(0)
    tokens, mask = torch.randint(9, (4, 6)), torch.ones(4, 6, dtype=torch.int64)
    model = Masked(9, 2).eval()
    for inputs in ({"mask": mask, "tokens": tokens}, (tokens, mask)):
        cut = split(model, 3, sample=inputs)
        assert torch.equal(run(cut, inputs), model(tokens, mask))
        assert cut.with_bundles(inputs).cuts_changed_by("int8") == cut.cuts
    said = refusal(split, model, 2, sample={"tokens": tokens})
    assert said.startswith(
        "sample of shape (6,) does not fit Masked, which says: Masked.forward() mi"
    )


def test_several_outputs_come_out_as_they_are():
    torch.manual_seed(0)
    model, x = TwoHeads(4, 3), X
    found = run(split(model, 3, sample=x), x)
    assert all(torch.equal(a, b) for a, b in zip(found, model(x), strict=True))


def test_a_causal_mask_crosses_no_cut_and_stays_out_of_checkpoints():
    tokens = torch.randint(9, (4, 6))
    model = Characters(9, 6).eval()
    cut = split(model, 4, sample=tokens)
    assert not cut.with_bundles(tokens).cuts_changed_by("int8")
    assert names(cut) == sorted(model.state_dict())
    assert torch.equal(run(cut, tokens), model(tokens))


def test_a_statistic_of_two_blocks_is_refused():
    said = refusal(split, Normed(), 2, sample=X)
    assert "blocks 0 and 1 share the statistic 'between.running_mean'" in said


def test_a_tied_weight_is_a_copy_on_the_later_block():
    tokens = torch.randint(9, (4, 6))
    model = Tied()
    cut = split(model, 2, sample=tokens)
    assert cut.ties == {(0, 1): [["embedding.weight", "head.weight"]]}
    assert torch.equal(run(cut, tokens), model(tokens))
    assert names(cut) == sorted(model.state_dict())
    first, last = (dict(cut.module(k).named_parameters()) for k in (0, 1))
    assert first["0.embedding.weight"] is model.embedding.weight
    assert last["0.head.weight"] is not model.embedding.weight
    assert not split(model, 1, sample=tokens).ties


def test_draws_do_not_depend_on_the_cuts():
    """Dropout that is called twice, in blocks of many sizes, and with skips over the cuts."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            y = self.dropout(self.a(x))
            z = self.dropout(self.b(y))
            return self.c(z) + y

    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(16, 4)
    y = torch.randint(4, (16,))
    found = []
    for cuts in ([], ["b"], ["c"], ["b", "c"]):
        same = deepcopy(model)
        blocks = split(same, cuts=cuts, sample=x)
        settings = TrainSettings(epochs=2, batch_size=8, threads=1)
        Trainer(blocks, Backprop(), train=settings, quiet=True).fit((x, y), (x, y))
        found.append(torch.cat([p.detach().flatten() for p in same.parameters()]))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0], torch.cat([p.flatten() for p in model.parameters()]))


class Layers(nn.Module):
    def __init__(self, forward, **others):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.run = forward
        for name, other in others.items():
            setattr(self, name, other)

    def forward(self, x):
        return self.run(self, x)


def with_flag(self, x):
    for layer in self.layers:
        x = x + layer(x) * (2 if self.training else 1)
    return x


def with_scalar(self, x):
    total = 0
    for layer in self.layers:
        x = x + layer(x)
        total = total + x.pow(2).mean()
    return x + 0.01 * total


def with_spectrum(self, x):
    spectrum = torch.fft.rfft(self.layers[0](x))
    for layer in self.layers[1:]:
        x = layer(x)
    return x + torch.fft.irfft(spectrum, n=4)


def with_experts(self, x):
    for layer, expert in zip(self.layers, self.experts, strict=True):
        x = expert(x + layer(x))
    return x


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if len(rows := (weights.argmax(1) == i).nonzero().flatten()):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i : i + 1])
        return out


@pytest.mark.parametrize("forward", [with_flag, with_scalar, with_spectrum, with_experts])
def test_blocks_of_any_network_train_to_the_bits_of_a_plain_loop(forward):
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 4
    experts = {"experts": nn.ModuleList(Experts() for _ in range(4))}
    model = Layers(forward, **(experts if forward is with_experts else {}))
    plain = deepcopy(model).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for epoch in range(2):
        for rows in epoch_order(0, epoch, 16).split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x[rows]), y[rows]).backward()
            optimizer.step()
    for count in (1, 2, 3):
        same = deepcopy(model)
        settings = {
            "train": {"epochs": 2, "batch_size": 4, "threads": 1},
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0},
            "schedule": {"name": "constant", "warmup_epochs": 0},
        }
        Trainer(split(same, count, sample=x[:2]), Backprop(), quiet=True, **settings).fit(
            (x, y), (x, y)
        )
        assert_same(same.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.LazyLinear(4), "other cannot be cut .*a lazy module"),
        (torch.Generator(), "has its own torch.Generator"),
        (Lock(), "Layers cannot be copied .*_thread.lock"),
        (torch.jit.script(nn.Linear(4, 4)), "other cannot be cut .* compiled by torch.jit"),
    ],
)
def test_a_module_whose_calls_blocks_cannot_have_is_refused_with_its_name(other, said):
    assert re.search(said, refusal(split, Layers(with_flag, other=other), 2, sample=X))


def test_a_forward_that_recomputes_its_draws_is_refused():
    def recomputing(self, x):
        for layer in self.layers:
            x = x + checkpoint(lambda z, f=layer: self.dropout(f(z)), x, use_reentrant=False)
        return x

    def reentrant(self, x):
        first, second, *_ = self.layers
        return checkpoint(lambda z: nn.functional.dropout(second(z)), first(x), use_reentrant=True)

    data = torch.randn(16, 4), torch.arange(16) % 4
    for forward in (recomputing, reentrant):
        blocks = split(Layers(forward, dropout=nn.Dropout(0.5)), cuts=["layers.1"], sample=X)
        trainer = Trainer(blocks, Backprop(), train={"batch_size": 8}, quiet=True)
        assert "random numbers in a backward pass" in refusal(trainer.fit, data)


def test_the_only_element_of_a_list_begins_a_unit():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(3))

        def forward(self, x):
            for stage in self.stages:
                x = stage[0](x).relu()
            return x

    cut = split(Stages(), 3, sample=X)
    assert cut.cuts == ["stages.1.0", "stages.2.0"]


class Packing(nn.Module):
    """Saves the scale of a weight, no buffer, and changes it in a pass in evaluation."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inner[0].weight.scale = torch.ones(2)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.inner[0].weight.scale

    def forward(self, x):
        if not self.training:
            self.inner[0].weight.scale.mul_(2)
        return self.inner[1](self.inner[0](x))


def test_what_a_pass_changes_of_what_is_saved_besides_buffers_is_refused():
    said = refusal(lambda: split(Packing(), 2, sample=torch.ones(2, 4)))
    assert "Packing saves 'scale', no parameter or buffer, which a pass changes" in said
