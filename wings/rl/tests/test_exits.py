"""An environment may fail, but not end the process as if all had gone well."""

import gymnasium
import torch
from answers import assert_one_line
from misused import leaving
from rl_runs import words

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
