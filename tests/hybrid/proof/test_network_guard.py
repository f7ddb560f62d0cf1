"""A callback, which the first rank alone calls, changes nothing that other ranks would not see."""

import pytest
import torch
from problems import trained_by_hand
from torch import nn
from trainings import BATCH, assert_same, digits, refused, trained_weights, trainer_of

from hybrid import Callback
from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop


class Scaled(nn.Module):
    """tanh(tau W x), which notes its passes."""

    def __init__(self, size, out):
        super().__init__()
        self.linear, self.tau, self.calls = nn.Linear(size, out), 1.0, 0
        self.table, self.mask = [1.0, 2.0], torch.ones(out)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.aux = x.mean()
        return torch.tanh(self.tau * self.linear(x))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), Scaled(64, 8), Scaled(8, 8), nn.Linear(8, 10))


class Changing(Callback):
    """Does something to the network in a hook."""

    def __init__(self, model, change, hook="on_epoch"):
        def changed(*_):
            change(model)  # what it gives asks for nothing

        setattr(self, hook, changed)


def made(change, blocks=2, hook="on_epoch", **settings):
    model, cuts = network(), ["2"] if blocks == 2 else None
    callbacks = [Changing(model, change, hook)]
    settings = {"solver": Backprop(), "callbacks": callbacks, **settings}
    return trainer_of(model, blocks=blocks, cuts=cuts, **settings)


@pytest.fixture(scope="module")
def few():
    return digits(3)


def assert_refused(trainer, few, name, hook="on_epoch"):
    said = refused(trainer, few)
    assert said.startswith(f"callback Changing failed in {hook}: it changed the {name}, and other")


ATTRIBUTES = {
    "a number of block 1": (lambda net: setattr(net[2], "tau", 0.9), "2.tau"),
    "one of the network": (lambda net: setattr(net, "best", 3), "best"),
    "no more": (lambda net: delattr(net[2], "tau"), "2.tau"),
    "an entry": (lambda net: net[1].table.__setitem__(1, 3.0), "1.table"),
    "a tensor in place": (lambda net: net[2].mask.zero_(), "2.mask"),
    "another buffer": (lambda net: setattr(net[1], "scale", torch.ones(())), "1.scale"),
    "another module": (lambda net: net.__setitem__(3, nn.Linear(8, 10)), "3"),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_a_callback_that_sets_attributes_of_several_blocks_is_refused(kind, few):
    change, name = ATTRIBUTES[kind]
    assert_refused(made(change), few, f"attribute {name}")


@pytest.mark.parametrize("hook", ["on_start", "on_report", "on_epoch"])
def test_every_hook_is_watched_while_a_run_trains(hook, few):
    def change(net):
        net[1].tau *= 0.9

    assert_refused(made(change, hook=hook), few, "attribute 1.tau", hook)
    made(lambda net: setattr(net, "done", True), hook="on_end").fit(*few)


def test_one_rank_trains_with_the_attributes_that_a_callback_sets(few):
    """As in a loop; but for what belongs to none of its modules."""

    def halve(net):
        net[1].tau *= 0.5

    by_hand, train = network().to(memory_format=torch.channels_last), few[0]

    def steps():
        for epoch in range(2):
            for ids in epoch_order(0, epoch, len(train)).split(BATCH):
                yield train.batch(ids, 0, epoch), train.labels[ids], 0.1
            halve(by_hand)

    constant = {"schedule": {"name": "constant", "warmup_steps": 0}}
    found = trained_weights(made(halve, 1, **constant), few)
    assert_same(found, trained_by_hand(by_hand, steps()))
    assert_refused(made(lambda net: setattr(net, "tau", 0.5), 1), few, "attribute tau")


def clamp(net):
    net[2].linear.weight.data.clamp_(-1e-3, 1e-3)


STATES = {
    "mode of": (lambda net: net[1].eval(), "1"),
    "requires_grad of": (lambda net: net[2].linear.requires_grad_(False), "2.linear.weight"),
    "numbers of": (clamp, "2.linear.weight"),
    "numbers of ": (lambda net: net[2].scale.fill_(2.0), "2.scale"),
}


@pytest.mark.parametrize("kind", STATES)
def test_what_replicas_have_of_their_own_is_not_changed_on_the_first_alone(kind, few):
    """Nor other processes; threads of one replica have it in common, and it holds."""
    change, name = STATES[kind]
    assert_refused(made(change, replicas=2), few, f"{kind.strip()} {name}")
    if kind != "requires_grad of":  # which train.frozen alone may say
        made(change).fit(*few)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_callback_may_look_at_the_network(replicas, few):
    def look(net):
        modes = [m.training for m in net.modules()]
        net.eval()
        with torch.no_grad():
            net(torch.zeros(4, 1, 8, 8))
        for module, mode in zip(net.modules(), modes, strict=True):
            module.training = mode
        net[1].tau = 1.0

    made(look, hook="on_report", replicas=replicas).fit(*few)
