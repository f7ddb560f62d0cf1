"""An actor: an environment, and a policy whose weights are older by a fixed number of updates."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.environment import Episodes
from hybrid_rl.learning import draws
from hybrid_rl.learning.networks import fill, flat
from hybrid_rl.learning.replay import packed
from hybrid_rl.parts import Networks, Port, Tensors


class Actor:
    """Parts 2, 3, ...: an environment each, and a policy whose weights are `lag` updates old.

    Step t uses the weights after update t - lag, or the first ones where there is no such update.
    Its transition goes left, behind those of the actors before it.
    """

    def __init__(self, networks: Networks, number: int, left: Port, right: Port | None) -> None:
        rl = self.rl = networks.rl
        self.number, self.left, self.right = number, left, right
        self.episodes = Episodes(rl.env, rl.seed, draws.EPISODES, number)
        made = networks.representation()
        self.phi = torch.nn.Identity() if made is None else made.phi
        self.policy = networks.policy()
        self.networks = self.phi, self.policy
        self.received = rl.random_rounds
        """The first update whose weights have not come yet."""
        self.waiting: deque[Tensor] = deque()
        """Weights that have come before their step."""
        self.ended: list[dict[str, Any]] = []
        """Episodes that have ended since the last report."""

    def receive_weights(self, t: int) -> None:
        """Take the weights of step t, and pass them on."""
        if t - self.rl.lag >= self.rl.random_rounds:
            if not self.waiting:
                self._receive()
            fill(self.waiting.popleft(), *self.networks)

    def drain(self, t: int) -> None:
        """Receive all weights up to those of update t - 1, which later steps will take."""
        while self.received < t:
            self._receive()

    def _receive(self) -> None:
        weights = self.left.receive()
        if self.right is not None:
            self.right.send(weights)
        self.waiting.append(weights)
        self.received += 1

    @torch.no_grad()
    def act(self, t: int) -> None:
        """Do step t."""
        state = self.episodes.state
        generator = draws.generator(self.rl.seed, draws.ACTIONS, self.number, t)
        width = self.policy.actions
        if t < self.rl.random_rounds:
            action = torch.rand(width, generator=generator) * 2 - 1
        else:
            noise = torch.randn(1, width, generator=generator)
            action = self.policy(self.phi(state.unsqueeze(0)), noise)[0][0]
        reward, terminated, next_state, ended = self.episodes.step(action)
        if ended is not None:
            step = (t + 1) * self.rl.actors
            taken = {"actor": self.number, "return": ended[0], "length": ended[1]}
            self.ended.append({"step": step, **taken})
        rows = packed(state, action, reward, terminated, next_state)
        self.left.send(rows if self.right is None else torch.cat([rows, self.right.receive()]))

    @torch.no_grad()
    def evaluate(self, t: int) -> list[float]:
        """The returns of episodes without noise, by the newest weights that have come."""
        before = flat(*self.networks)
        if self.waiting:
            fill(self.waiting[-1], *self.networks)
        seeds = self.rl.seed, draws.EVALUATION, t
        tried = [Episodes(self.rl.env, *seeds, i) for i in range(self.rl.episodes)]
        found: dict[int, float] = {}
        while len(found) < len(tried):
            going = [i for i in range(len(tried)) if i not in found]
            states = torch.stack([tried[i].state for i in going])
            for i, action in zip(going, self.policy.best(self.phi(states)), strict=True):
                *_, ended = tried[i].step(action)
                if ended is not None:
                    found[i] = ended[0]
        fill(before, *self.networks)
        return [found[i] for i in range(len(tried))]

    def tensors(self) -> Tensors:
        """What a checkpoint keeps, once all weights that were under way have come."""
        own = {"weights": flat(*self.networks)}
        if self.waiting:
            own["waiting"] = torch.stack(list(self.waiting))
        return {**own, **{f"episode/{name}": t for name, t in self.episodes.tensors().items()}}

    def restore(self, tensors: Tensors, t: int) -> None:
        """Go on before step t; ValueError if these are not the tensors of that step."""
        weights = tensors["weights"]
        fill(weights, *self.networks)
        self.waiting = deque(tensors["waiting"]) if "waiting" in tensors else deque()
        self.received = max(t, self.rl.random_rounds)
        wanted = [weights.shape] * min(self.rl.lag, self.received - self.rl.random_rounds)
        if [each.shape for each in self.waiting] != wanted:
            raise ValueError(f"{len(self.waiting)} weights wait for an actor, not {len(wanted)}")
        episode = {n.partition("/")[2]: v for n, v in tensors.items() if n.startswith("episode/")}
        self.episodes.restore(episode)
