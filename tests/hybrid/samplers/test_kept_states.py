"""What a checkpoint keeps of a sampler, taken back or refused."""

import pytest
import torch
from answers import refusal
from trainings import digits

from hybrid.samplers import AutoAssist, SelectiveBackprop
from hybrid.samplers.batch_sampler import BatchSampler
from solvers.state import State


@pytest.mark.parametrize(
    "sampler", [AutoAssist(lag=2), SelectiveBackprop(lag=2)], ids=lambda s: s.name
)
def test_what_a_checkpoint_keeps_of_a_sampler_is_looked_at(sampler):
    data, _ = digits(1)
    made = BatchSampler(sampler, data, 0, 8)
    for number in range(3):
        made.ids(0, [number])
        made.take_losses([[torch.ones(8)]])
    kept = made.state().block
    BatchSampler(sampler, data, 0, 8).load_state(State(block=kept))
    for name, tensor in kept.items():
        other = tensor.double() if tensor.dtype != torch.float64 else tensor.float()
        wrong = [tensor.unsqueeze(0)] + ([] if name.endswith(" losses") else [other])
        for value in wrong:
            said = refusal(
                BatchSampler(sampler, data, 0, 8).load_state, State(block=kept | {name: value})
            )
            assert said.startswith("the sampler's "), name
            assert "it must be (" in said
