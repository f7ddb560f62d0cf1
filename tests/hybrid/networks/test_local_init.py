"""A rank builds the units of its own block: with the whole network's bits, in their memory."""

import random
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from small_networks import Characters
from torch import nn

from hybrid import split
from hybrid.networks import models
from hybrid.networks.local_init import LARGE, build_local, divide, free_remote, share_memory

WIDTH = 192


def square(count, start=nn.Identity):
    return nn.Sequential(start(), *(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


class Initialized(nn.Sequential):
    """After its units are made, all are drawn anew, one by another kind of kernel."""

    def __init__(self):
        super().__init__(*square(4))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight)
        nn.init.orthogonal_(self[2].weight)
        nn.init.zeros_(self[3].bias)


class Copied(nn.Sequential):
    """Its units are copies of one that it does not keep, and a random one of its own."""

    def __init__(self):
        first = nn.Linear(WIDTH, WIDTH)
        order = [deepcopy(first) for _ in range(3)]
        scale = random.random() + np.random.random()
        super().__init__(*order, nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            self[3].weight.mul_(scale)


class Reading(nn.Sequential):
    """The last unit begins with another's weights, which no rank has by itself."""

    def __init__(self):
        super().__init__(*square(3))
        self[3].weight.data.copy_(self[1].weight)


class Seeing(nn.Sequential):
    """Its construction needs numbers, which there are none of without memory."""

    def __init__(self):
        super().__init__(*square(3))
        if float(self[1].weight.detach().abs().max()) > 1:
            self.append(nn.ReLU())


def characters():
    return Characters(32, 16, WIDTH)


NETWORKS = {
    "resnet20": (partial(models.build, "resnet20", 10, 3, 8), None),
    "wrn-10-4": (partial(models.build, "wrn-10-4", 10, 3, 8), None),
    "revnet8": (partial(models.build, "revnet8", 10, 3, 8), None),
    "square": (partial(square, 4), torch.zeros(4, WIDTH)),
    "initialized": (Initialized, torch.zeros(4, WIDTH)),
    "copied": (Copied, torch.zeros(4, WIDTH)),
    "characters": (characters, torch.zeros(4, 16, dtype=torch.int64)),
}
WHOLE = {"reading": Reading, "seeing": Seeing}


def seeded(make):
    torch.manual_seed(5)
    return make()


def cutter(sample, measured=False):
    """Into three blocks of counted operations."""

    def cut(made, cuts=None):
        balance = "measured" if measured else "operations"
        return split(made, None if cuts else 3, cuts=cuts, balance=balance, sample=sample)

    return cut


def memory(parameters):
    """Bytes of parameters, a shared memory once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values())


def built_by(make, cut, division, index):
    """The blocks as the rank of one of them has them."""
    blocks = cut(build_local(partial(seeded, make), division, {index}), division.cuts)
    state = torch.get_rng_state()
    share_memory(blocks, {index})
    return blocks, state


@pytest.mark.parametrize("name", NETWORKS)
def test_a_rank_has_its_block_with_the_bits_of_the_whole_network_and_little_else(name):
    make, sample = NETWORKS[name]
    cut = cutter(sample)
    random.seed(1)
    np.random.seed(1)
    division = divide(partial(seeded, make), cut, measured=False)
    assert division.allocations
    drawn = random.getstate(), np.random.get_state()
    whole = cut(seeded(make))
    after = torch.get_rng_state()
    assert (division.starts, division.costs) == (whole.starts, whole.costs)
    for index in range(3):
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        blocks, state = built_by(make, cut, division, index)
        assert torch.equal(state, after)
        own = blocks.module(index).state_dict()
        assert all(torch.equal(own[k], x) for k, x in whole.module(index).state_dict().items())
        others = [p for k in {0, 1, 2} - {index} for p in blocks.module(k).parameters()]
        small = memory(p for p in others if p.nbytes < LARGE)
        assert memory(others) - small == max(
            [p.nbytes for p in others if p.nbytes >= LARGE], default=0
        )
        free_remote(blocks, index)
        assert memory(others) - small <= 4 * len(others)


@pytest.mark.parametrize("name", WHOLE)
def test_a_network_that_cannot_be_built_in_parts_is_built_whole_and_let_go_of(name):
    cut = cutter(torch.zeros(4, WIDTH))
    division = divide(partial(seeded, WHOLE[name]), cut, measured=False)
    whole = cut(seeded(WHOLE[name]))
    for index in range(3):
        blocks, _ = built_by(WHOLE[name], cut, division, index)
        own = blocks.module(index).state_dict()
        assert all(torch.equal(own[k], x) for k, x in whole.module(index).state_dict().items())
        assert memory(blocks.model.parameters()) < memory(whole.model.parameters())


def test_measured_cuts_are_those_of_the_rank_that_measured():
    cut = cutter(torch.zeros(4, WIDTH), measured=True)
    division = divide(partial(seeded, partial(square, 5)), cut, measured=True)
    assert division.allocations
    assert len(division.costs) == 6
    whole = square(5)
    blocks = cut(whole, division.cuts)
    assert division.starts == blocks.starts
    assert {k for a in division.allocations.values() for k in a.blocks} == {0, 1, 2}


def test_what_a_rank_has_let_go_of_can_neither_be_written_to_nor_trained():
    blocks = cutter(torch.zeros(4, WIDTH))(square(3))
    weights = deepcopy(blocks.model.state_dict())
    free_remote(blocks, 0)
    free_remote(blocks, 0)
    with pytest.raises(RuntimeError):
        blocks.model.load_state_dict(weights)
    with pytest.raises(ValueError, match=r"weights of 2.weight are another rank's since a traini"):
        free_remote(blocks, 1)
