"""Cuts beside code with a life of its own: Functions, gradients, code of others, shared weights."""

import weakref
from copy import deepcopy
from typing import ClassVar

import numpy as np
import pytest
import torch
from answers import refusal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainings import assert_same

from hybrid import Trainer, split
from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop

WIDTH, SAMPLES, BATCH, RATE = 6, 16, 8, 0.1
RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, WIDTH, generator=RANDOM)
Y = torch.randint(3, (SAMPLES,), generator=RANDOM)


class Layers(nn.Module):
    """Four layers, each applied by `act`, and a head."""

    def __init__(self, act=None, forward=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.act, self.run = act, forward

    def forward(self, x):
        if self.run:
            return self.run(self, x)
        for layer in self.layers:
            x = self.act(layer, x)
        return self.head(x)


def assert_trains_as_a_plain_loop(model, cuts, loss=F.cross_entropy, x=X, y=Y, **settings):
    plain = deepcopy(model).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for epoch in range(2):
        for rows in epoch_order(0, epoch, SAMPLES).split(BATCH):
            optimizer.zero_grad()
            loss(plain(x[rows]), y[rows]).backward()
            optimizer.step()
    options = {
        "train": {"epochs": 2, "batch_size": BATCH, "threads": 1},
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_epochs": 0},
        "loss": loss,
        "metrics": {},
    }
    blocks = split(model, cuts=cuts, sample=x[:2])
    Trainer(blocks, Backprop(), quiet=True, **{**options, **settings}).fit((x, y))
    assert len(blocks) == len(cuts) + 1
    assert_same(model.state_dict(), plain.state_dict())
    return blocks


class Rounded(torch.autograd.Function):
    """The nearest integers, with the gradient of what was rounded."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, p):
        return p


class Twice(torch.autograd.Function):
    """x w and 2 x w."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x @ w
        return y, 2 * y

    @staticmethod
    def backward(ctx, p, q):
        x, w = ctx.saved_tensors
        return (p + 2 * q) @ w.T, x.T @ (p + 2 * q)


class OwnWeights(Layers):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(0.1 * torch.randn(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer, weight in zip(self.layers, self.weights, strict=True):
            x, y = Twice.apply(layer(x), weight)
        return self.head(x + y)


def by_checkpoint(some):
    def act(layer, x):
        if layer.some:
            return checkpoint(lambda z: layer(z).tanh(), x, use_reentrant=True)
        return layer(x)

    model = Layers(act)
    for i, layer in enumerate(model.layers):
        layer.some = i in some
    return model


def frozen(self, x):
    x = self.layers[0](x)
    with torch.no_grad():
        h = self.layers[2](self.layers[1](x).tanh())
    return self.head(self.layers[3](h) + x)


@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        (Layers(lambda layer, x: Rounded.apply(4 * layer(x).tanh())), ["layers.2"]),
        (OwnWeights(), ["layers.1", "head"]),
        (by_checkpoint({1}), ["layers.2"]),
        (by_checkpoint({2}), ["layers.2"]),
        (by_checkpoint({1, 2, 3}), ["head"]),
        (Layers(forward=frozen), ["layers.2"]),
    ],
)
def test_what_a_function_without_a_graph_inside_gives_may_cross_a_cut(model, cuts):
    assert_trains_as_a_plain_loop(model, cuts)


def energy(self, x):
    x = self.layers[0](x)
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        e = self.layers[2](self.layers[1](x).tanh())
        (force,) = torch.autograd.grad(e.square().sum(), x, create_graph=True)
    return self.head(self.layers[3](force) + x)


def transformed(self, x):
    force = torch.func.grad(lambda z: self.layers[2](self.layers[1](z)).square().sum())(x)
    return self.head(force)


def again(self, x):
    x = self.layers[0](x)
    h = Rounded.apply(4 * x)
    return self.head(self.layers[1](h) + Rounded.apply(h))


@torch.jit.script
def compiled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.tanh(x.numpy()))

    @staticmethod
    def backward(ctx, p):
        return p


OTHERS = "its parts give other numbers or gradients"


@pytest.mark.parametrize(
    ("model", "cut", "said"),
    [
        (Layers(forward=again), "layers.1", OTHERS),
        (Layers(forward=energy), "layers.2", "other tensors would cross in training"),
        (Layers(forward=transformed), "layers.2", "an output depends on tensors of another block"),
        (Layers(lambda f, x: compiled(f(x))), "layers.2", "nothing can cross"),
        (Layers(lambda f, x: x + compiled(f(x))), "layers.2", "of another block alone"),
        (Layers(lambda f, x: ByNumpy.apply(f(x))), "layers.2", "nothing can cross"),
    ],
)
def test_a_cut_in_code_that_cannot_be_cut_is_refused_and_one_block_is_not(model, cut, said):
    text = refusal(split, model, cuts=[cut], sample=X)
    assert f"there is no cut before '{cut}'" in text
    assert said in text
    assert_trains_as_a_plain_loop(model, [])


def test_code_of_others_inside_a_module_does_not_keep_the_network_from_being_cut():
    class Inside(nn.Linear):
        def forward(self, x):
            return compiled(super().forward(x))

    model = Layers(lambda layer, x: layer(x))
    model.layers = nn.ModuleList(Inside(WIDTH, WIDTH) for _ in range(4))
    assert_trains_as_a_plain_loop(model, ["layers.2"])


class Words(nn.Module):
    """The embedding's weight is the output layer's, by the code of the forward."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens):
        x = self.e(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.linear(x, self.e.weight)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, 4, bias=False)])

    def forward(self, x):
        for layer in self.encoder:
            x = layer(x).tanh()
        for layer in reversed(self.encoder):
            x = F.linear(x, layer.weight.t())
        return x


def penalized(self, x):
    for layer in self.layers:
        x = layer(x).tanh()
    return self.head(x) + 0.01 * sum(layer.weight.square().sum() for layer in self.layers[:1])


def in_evaluation_only(self, x):
    for layer in self.layers:
        x = layer(x).tanh()
    return self.head(x) if self.training else self.head(F.linear(x, self.layers[0].weight))


TOKENS = torch.randint(9, (SAMPLES, 4), generator=RANDOM)


def of_tokens(out, targets):
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("model", "cut", "names", "more"),
    [
        (Words(), "layers.1", ["e.weight"], {"x": TOKENS, "y": TOKENS, "loss": of_tokens}),
        (Autoencoder(), "encoder.1", ["encoder.0.weight"], {}),
        (Layers(forward=penalized), "layers.2", ["layers.0.weight"], {}),
        (Layers(forward=in_evaluation_only), "layers.2", ["layers.0.weight"], {}),
    ],
)
def test_a_weight_is_of_every_block_whose_code_uses_it(model, cut, names, more):
    first = dict(model.named_parameters())[names[0]]
    blocks = assert_trains_as_a_plain_loop(model, [cut], **more)
    assert blocks.ties == {(0, 1): [names]}
    (last,) = [p for n, p in blocks.module(1).named_parameters() if n == f"0.{names[0]}"]
    assert last is not first
    assert torch.equal(last, first)


def test_a_statistic_that_the_code_of_another_block_reads_is_refused():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    def reading(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) / (1 + self.layers[0].seen)

    model = Layers(forward=reading)
    model.layers[0] = Counting()
    said = refusal(split, model, cuts=["layers.2"], sample=X)
    assert "blocks 0 and 1 share the statistic 'layers.0.seen'" in said


def test_what_crosses_is_found_behind_a_result_that_is_no_tensor():
    """A cache among a module's results, which a block that skips the module does not have."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            first = self.a(x)
            results = {"last": self.b(first), "cache": object(), "first": first}
            return Results(results)

    def forward(self, x):
        found = self.body(x)
        return self.head(found["last"]) + self.head(found["first"])

    model = Layers(forward=forward)
    model.body = Body()
    model.layers = nn.ModuleList()
    assert_trains_as_a_plain_loop(model, ["head"])


class Results(dict):
    """Without what is None, as results of transformers are."""

    def __init__(self, results):
        super().__init__({name: x for name, x in results.items() if x is not None})


torch.utils._pytree.register_pytree_node(
    Results,
    lambda x: ([*x.values()], [*x]),
    lambda values, names: Results(dict(zip(names, values, strict=True))),
)


class Watching(nn.Module):
    """Counts how many of its layers' results are alive when a forward without a graph ends."""

    alive: ClassVar = []

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        results = []
        for layer in self.layers:
            x = layer(x) + 1
            results.append(weakref.ref(x))
        if not torch.is_grad_enabled():
            self.alive.append(sum(result() is not None for result in results))
        return x


def test_a_recorded_pass_keeps_no_activations_that_the_network_does_not_keep():
    split(Watching(), 3, sample=torch.zeros(2, 4))
    assert Watching.alive[0] == 1  # later passes are those of stages
