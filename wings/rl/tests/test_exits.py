"""An environment may fail, but not end the process as if all had gone well."""

from math import nan

import gymnasium
import torch
from answers import assert_one_line
from misused import leaving
from rl_runs import refused, words

ENDS = "would end the process: raise an error if the code fails, else return"


class Tired(gymnasium.Env):
    """Ends the process at its thirtieth step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        self.steps = 0
        return torch.zeros(2).numpy(), {}

    def step(self, action):
        self.steps += 1
        return torch.zeros(2).numpy(), 0.0, self.steps == 30 and leaving(), False, {}


def test_an_environment_that_exits_ends_the_command_with_one_line(hybrid, monkeypatch, tmp_path):
    gymnasium.register("Tired-v0", Tired)
    answer = hybrid("rl", *words(env="Tired-v0"), "--out", tmp_path / "run")
    gymnasium.registry.pop("Tired-v0")
    assert_one_line(answer, "SystemExit: 0 (misused.py, line ", ENDS, "details in ")


def test_what_this_package_refuses_is_not_taken_for_the_code_of_others(monkeypatch):
    monkeypatch.setattr(Tired, "step", lambda *_: (torch.zeros(2).numpy(), nan, False, False, {}))
    gymnasium.register("Odd-v0", Tired)
    why = refused(env="Odd-v0")
    gymnasium.registry.pop("Odd-v0")
    said = (
        "Odd-v0: the reward at step 1 of episode 0 is nan; it must be one finite number (float32)"
    )
    assert why == f"{said}: correct the environment"
