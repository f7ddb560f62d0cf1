"""An environment of gymnasium whose state is what was done since its episode began."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from hybrid.errors import one_line, printable
from hybrid_rl.learning.draws import number

_LARGEST = 1e6
"""The largest bound of an action."""


def make(name: str) -> Any:
    """The environment; ValueError if there is none of that name, or none that can be learned."""
    try:
        env = gymnasium.make(name, disable_env_checker=True)
    except (gymnasium.error.Error, ImportError) as error:
        why = one_line(error).rstrip(".")
        raise ValueError(
            f"rl.env is {name!r}: {why}. Choose an environment that is installed, for example "
            "Pendulum-v1"
        ) from None
    states, actions = env.observation_space, env.action_space
    if not (isinstance(states, Box) and len(states.shape) == 1):
        raise ValueError(
            f"rl.env is {name!r}, whose observations are {states}; they must be a vector of numbers"
        )
    if not (
        isinstance(actions, Box)
        and len(actions.shape) == 1
        and np.abs([actions.low, actions.high]).max() <= _LARGEST
    ):
        raise ValueError(
            f"rl.env is {name!r}, whose actions are {actions}; they must be a vector of bounded "
            "real numbers, like those of Pendulum-v1"
        )
    return env


def sizes(env: Any) -> tuple[int, int]:
    """The lengths of a state and of an action."""
    return env.observation_space.shape[0], env.action_space.shape[0]


class Episodes:
    """One episode after the other; each begins from a seed of its own.

    So an environment that draws only from its own generator is restored by repeating the actions of
    its current episode, whatever it keeps inside. A checkpoint holds nothing else of it.
    """

    def __init__(self, name: str, *seeds: int) -> None:
        self.env, self.name, self.seeds = make(name), name, seeds
        low, high = self.env.action_space.low, self.env.action_space.high
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self._begin(0)

    def _begin(self, episode: int) -> None:
        self.episode = episode
        self.actions: list[Tensor] = []
        self.total = 0.0
        """The return so far."""
        seen, _ = self.env.reset(seed=number(*self.seeds, episode) % 2**31)
        self.state = self._observed(seen)
        """(states,), float32."""

    def step(self, action: Tensor) -> tuple[float, bool, Tensor, tuple[float, int] | None]:
        """Reward, whether the episode ended by itself, the next state; at its end also (return, n).

        n is the number of its steps; the next episode has then begun. `action`, (actions,), lies
        within -1..1, which are the environment's bounds. ValueError for a reward or an observation
        that nothing can be learned from, and for an action that is not finite.
        """
        if not bool(action.isfinite().all()):
            raise ValueError(
                f"the action at step {len(self.actions)} of episode {self.episode} is not finite, "
                "because the policy's weights are not: lower rl.lr or rl.representation_lr"
            )
        done = (self._middle + self._half * action.numpy()).astype(self.env.action_space.dtype)
        seen, reward, terminated, truncated, _ = self.env.step(done)
        self.actions.append(action)
        reward = float(self._numbers("reward", reward, ()))
        self.total += reward
        self.state = state = self._observed(seen)
        ended = None
        if terminated or truncated:
            ended = self.total, len(self.actions)
            self._begin(self.episode + 1)
        return reward, bool(terminated), state, ended

    def _numbers(self, what: str, value: Any, shape: tuple[int, ...]) -> Any:
        """A value as an array; ValueError unless float32 can hold as many numbers as are wanted."""
        with suppress(ValueError, TypeError, OverflowError), np.errstate(over="ignore"):
            found = np.array(value, dtype=np.float64).reshape(shape)
            if np.isfinite(found.astype(np.float32)).all():
                return found
        step = f"step {len(self.actions)}" if self.actions else "the beginning"
        wanted = f"{shape[0]} finite numbers" if shape else "one finite number"
        raise ValueError(
            f"{self.name}: the {what} at {step} of episode {self.episode} is "
            f"{printable(repr(value), 200)}; it must be {wanted} (float32): correct the environment"
        )

    def _observed(self, seen: Any) -> Tensor:
        """(states,), float32."""
        numbers = self._numbers("observation", seen, self.env.observation_space.shape)
        return torch.from_numpy(numbers.astype(np.float32))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        width = self._middle.shape[0]
        done = torch.stack(self.actions) if self.actions else torch.empty(0, width)
        return {"episode": torch.tensor(self.episode), "actions": done, "state": self.state}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Repeat the actions of the episode; ValueError if they lead to another state."""
        episode, actions = int(tensors["episode"]), tensors["actions"]
        if episode < 0 or actions.shape[1:] != self._middle.shape:
            raise ValueError(f"{self.name} has other actions than those of this checkpoint")
        self._begin(episode)
        for action in actions:
            self.step(action)
        if self.episode != episode or not torch.equal(self.state, tensors["state"]):
            raise ValueError(
                f"{self.name} does not come to the same state by the same actions: it is another "
                "version, or draws from a generator of its own; start again with a new --out"
            )
