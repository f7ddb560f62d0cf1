"""Modules that use parameters by themselves, or recompute their passes, under delayed gradients."""

import pytest
import torch
from answers import refusal
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hybrid import Callback, Trainer, TrainSettings, split
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay
from hybrid_messages import PDASGD


def data():
    torch.manual_seed(1)
    return torch.randn(64, 6), torch.randint(0, 3, (64,))


class Branch(nn.Module):
    """x + tanh(R tanh(L x)), made again in the backward pass."""

    def __init__(self, recomputes=True, reentrant=False):
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.recomputes, self.reentrant = recomputes, reentrant

    def branch(self, x):
        return torch.tanh(self.right(torch.tanh(self.left(x))))

    def forward(self, x):
        if not self.recomputes:
            return x + self.branch(x)
        return x + checkpoint(self.branch, x, use_reentrant=self.reentrant)


def fit(network, solver, cuts, sample=None, rate=0.1, **settings):
    blocks = split(network, cuts=cuts, sample=sample)
    sgd = torch.optim.SGD(network.parameters(), lr=rate)
    train = TrainSettings(epochs=2, batch_size=8, threads=1)
    Trainer(blocks, solver, optimizer=sgd, train=train, quiet=True, **settings).fit(data())
    return network


def trained(recomputes, solver, reentrant=False):
    torch.manual_seed(0)
    # of the first block the input needs no gradient, which a reentrant checkpoint would take
    first = nn.Linear(6, 6)
    branches = [Branch(recomputes, reentrant) for _ in range(3)]
    network = nn.Sequential(first, *branches, nn.Linear(6, 3))
    return fit(network, solver, ["2", "4"]).state_dict()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "solver", [DDG(micro_batches=1), DDG(micro_batches=2, recompute=True), FeaturesReplay()]
)
def test_what_a_module_recomputes_is_at_the_weights_of_its_forward_pass(solver, reentrant):
    plain, again = trained(False, solver), trained(True, solver, reentrant)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_layers_that_step_by_themselves_recompute_at_their_own_weights():
    plain, again = (trained(recomputes, PDASGD()) for recomputes in (False, True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_without_older_weights_what_recomputes_is_refused(reentrant):
    solver = DDG(micro_batches=1, stash=False)
    message = refusal(lambda: trained(True, solver, reentrant))
    assert message.endswith("keep those of the forward pass (solver.stash=true)")
    trained(False, solver)


def test_threads_that_share_weights_refuse_what_recomputes():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), Branch(), nn.Linear(6, 3))
    message = refusal(lambda: fit(network, PDASGD(any_order=True), []))
    assert message.endswith("keep those of the forward pass (solver.any_order=false)")


@pytest.mark.parametrize("reentrant", [False, True])
def test_random_numbers_that_would_be_others_when_recomputed_are_refused(reentrant):
    class Dropping(Branch):
        def branch(self, x):
            return nn.functional.dropout(super().branch(x), 0.5, self.training)

    network = nn.Sequential(nn.Linear(6, 6), Dropping(True, reentrant), nn.Linear(6, 3))
    message = refusal(lambda: fit(network, Backprop(), ["2"]))
    assert "draws random numbers in a backward pass" in message
    network[1].recomputes = False
    fit(network, Backprop(), ["2"])


class Scaled(nn.Module):
    """What goes through it is multiplied by a function of a parameter alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.p = nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = self.a(x) * self.p.exp()
        torch.tanh(x)  # used by nothing, but it is counted
        return self.out(torch.tanh(self.b(x)))


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_epoch(self, epoch, results):
        self.losses.append(results["loss"])


@pytest.mark.parametrize("solver", [DDG(micro_batches=1), FDG(micro_batches=1)])
def test_an_operation_on_a_parameter_alone_is_one_of_the_network(solver):
    torch.manual_seed(0)
    network, (x, y), seen = Scaled(), data(), Losses()
    with torch.no_grad():
        loss = float(cross_entropy(network(x), y))
    fit(network, solver, ["b"], x[:4], rate=1e-9, callbacks=[seen])
    assert seen.losses == pytest.approx([loss, loss], rel=1e-5)
