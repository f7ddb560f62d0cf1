"""An actor: an environment, and a policy whose weights are older by a fixed number of updates."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from hybrid.rl.environment import Episodes
from hybrid.rl.learning import draws
from hybrid.rl.learning.networks import fill, flat
from hybrid.rl.learning.replay import packed
from hybrid.rl.parts import Kept, Networks
from hybrid.rl.ports import Port


class Actor:
    """Parts 2, 3, ...: an environment each, and a policy whose weights are `lag` updates old.

    step t   takes the weights after update t - lag (the first ones where there is none),
             and sends its transition left, behind those of the actors before it
    """

    def __init__(self, networks: Networks, number: int, left: Port, right: Port | None) -> None:
        rl = self.rl = networks.rl
        self.number, self.left, self.right = number, left, right
        self.episodes = Episodes(rl.env, rl.seed, draws.EPISODES, number)
        made = networks.representation()
        self.phi = None if made is None else made.phi
        self.policy = networks.policy()
        self.heard = rl.random_rounds
        """The first update whose weights have not come yet."""
        self.waiting: deque[Tensor] = deque()
        """Weights that have come before their step."""
        self.ended: list[dict[str, Any]] = []
        """Episodes that have, since they were last asked for."""

    def hear(self, t: int) -> None:
        """Take the weights of step t, and pass them on."""
        if t - self.rl.lag >= self.rl.random_rounds:
            if not self.waiting:
                self._receive()
            self.take(self.waiting.popleft())

    def drain(self, t: int) -> None:
        """Receive all weights up to those of update t - 1, which steps to come will take."""
        while self.heard < t:
            self._receive()

    def _receive(self) -> None:
        weights = self.left.receive()
        if self.right is not None:
            self.right.send(weights)
        self.waiting.append(weights)
        self.heard += 1

    def take(self, weights: Tensor) -> None:
        """Act by these from here on."""
        fill(weights, *self._networks)

    @property
    def _networks(self) -> list[torch.nn.Module]:
        return [self.policy] if self.phi is None else [self.phi, self.policy]

    @torch.no_grad()
    def act(self, t: int) -> None:
        """Do step t."""
        state = self.episodes.state
        begun = draws.generator(self.rl.seed, draws.ACTIONS, self.number, t)
        width = self.policy.actions
        if t < self.rl.random_rounds:
            action = torch.rand(width, generator=begun) * 2 - 1
        else:
            noise = torch.randn(1, width, generator=begun)
            action = self.policy(self.features(state.unsqueeze(0)), noise)[0][0]
        reward, terminated, next_state, over = self.episodes.step(action)
        if over is not None:
            step = (t + 1) * self.rl.actors
            taken = {"actor": self.number, "return": over[0], "length": over[1]}
            self.ended.append({"step": step, **taken})
        rows = packed(state, action, reward, terminated, next_state)
        self.left.send(rows if self.right is None else torch.cat([rows, self.right.receive()]))

    def features(self, states: Tensor) -> Tensor:
        """z_s, (N, .)."""
        found: Tensor = states if self.phi is None else self.phi(states)
        return found

    @torch.no_grad()
    def evaluate(self, t: int) -> list[float]:
        """The returns of episodes without noise, by the newest weights that have come."""
        before = flat(*self._networks)
        if self.waiting:
            self.take(self.waiting[-1])
        seeds = self.rl.seed, draws.EVALUATION, t
        tried = [Episodes(self.rl.env, *seeds, i) for i in range(self.rl.episodes)]
        found: dict[int, float] = {}
        while len(found) < len(tried):
            going = [i for i in range(len(tried)) if i not in found]
            states = torch.stack([tried[i].state for i in going])
            for i, action in zip(going, self.policy.best(self.features(states)), strict=True):
                *_, over = tried[i].step(action)
                if over is not None:
                    found[i] = over[0]
        self.take(before)
        return [found[i] for i in range(len(tried))]

    def kept(self) -> Kept:
        """What a checkpoint keeps, once all weights that were under way have come."""
        own = {"weights": flat(*self._networks)}
        if self.waiting:
            own["waiting"] = torch.stack(list(self.waiting))
        return {**own, **{f"episode/{name}": t for name, t in self.episodes.kept().items()}}

    def restore(self, kept: Kept, t: int) -> None:
        """Go on before step t; ValueError if it is not what is kept there."""
        self.take(kept["weights"])
        self.waiting = deque(kept["waiting"]) if "waiting" in kept else deque()
        self.heard = max(t, self.rl.random_rounds)
        wanted = [kept["weights"].shape] * min(self.rl.lag, self.heard - self.rl.random_rounds)
        if [weights.shape for weights in self.waiting] != wanted:
            raise ValueError(f"{len(self.waiting)} weights wait for an actor, not {len(wanted)}")
        episode = {n.partition("/")[2]: v for n, v in kept.items() if n.startswith("episode/")}
        self.episodes.restore(episode)
