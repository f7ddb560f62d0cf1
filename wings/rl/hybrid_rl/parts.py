"""What joins the parts of a run, and those before the actors: representation and learner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.links import RankLinks
from hybrid.networks.units import Unit
from hybrid_rl.learning import draws, sac
from hybrid_rl.learning.networks import Head, Policy, fill, flat
from hybrid_rl.learning.replay import Batch, Replay
from hybrid_rl.learning.representation import Frozen, Representation
from hybrid_rl.settings import RlSettings

Tensors = dict[str, Tensor]
Optimizers = dict[str, torch.optim.Optimizer]


class Port(NamedTuple):
    """One side of a part: what is sent first arrives first."""

    send: Callable[[Tensor], None]
    receive: Callable[[], Tensor]


def parts_of(rank: int, ranks: int, parts: int) -> range:
    """The parts that a rank has: one each, and the last rank has all that are left."""
    return range(rank, rank + 1 if rank < ranks - 1 else parts)


def ports(links: RankLinks, parts: int) -> dict[int, tuple[Port, Port]]:
    """The left and the right port of every part of this rank: queues within it, links outside.

    The outer ports of the whole chain are never used.
    """
    own = parts_of(links.rank, links.size, parts)
    left, right = [Port(links.to_previous, links.from_previous)], list[Port]()
    for _ in own[:-1]:
        to_right, to_left = deque[Tensor](), deque[Tensor]()
        right.append(Port(to_right.append, to_left.popleft))
        left.append(Port(to_left.append, to_right.popleft))
    right.append(Port(links.to_next, links.from_next))
    return dict(zip(own, zip(left, right, strict=True), strict=True))


class Networks:
    """The networks before their first step, the same on every rank."""

    def __init__(self, rl: RlSettings, states: int, actions: int) -> None:
        self.rl, self.states, self.actions = rl, states, actions
        own = rl.units if rl.representation else 0
        self.z_s, self.z_sa = states + own, states + own + actions + own

    def representation(self) -> Representation | None:
        """None where rl.representation is off."""
        rl = self.rl
        if not rl.representation:
            return None
        generator = draws.generator(rl.seed, draws.WEIGHTS, 0)
        return Representation(self.states, self.actions, rl.units, rl.layers, generator)

    def policy(self) -> Policy:
        """The policy before its first step."""
        made = Policy(self.z_s, self.rl.width, self.actions)
        draws.initialize(made, draws.generator(self.rl.seed, draws.WEIGHTS, 1))
        return made

    def learner(self) -> sac.Learner:
        """Critics, policy and temperature."""
        rl = self.rl
        critics = Head(self.z_sa, rl.width, 1), Head(self.z_sa, rl.width, 1)
        generator = draws.generator(rl.seed, draws.WEIGHTS, 2)
        for critic in critics:
            draws.initialize(critic, generator)
        return sac.Learner(self.policy(), critics, rl.discount, rl.polyak)


class Front:
    """Part 0: the replay buffer, and the representation with its own loss.

    At update t it adds the transitions of step t, learns from U mini-batches, and sends after each

        [z_s, z_sa, z_s', outcome]  (batch, .)     and the weights of phi and psi, one vector

    Without a representation it sends the states and actions themselves, and no weights.
    """

    def __init__(self, networks: Networks, right: Port) -> None:
        rl = self.rl = networks.rl
        self.right = right
        size = min(rl.replay_size, rl.steps)
        self.replay = Replay(size, networks.states, networks.actions)
        self.network = networks.representation()
        self.adam: torch.optim.Optimizer | None = None
        if self.network is not None:
            own = self.network.parameters()
            self.adam = torch.optim.Adam(own, rl.representation_lr, fused=True)
        self.losses: list[Tensor] = []

    def pretrain(self) -> None:
        """Learn to predict from what random actions have shown."""
        for step in range(self.rl.pretraining):
            self._learn(step, draws.PRETRAINING)

    def learn(self, t: int) -> None:
        """Step t of the actors, and the updates that follow it."""
        self.replay.add(self.right.receive())
        if t < self.rl.random_rounds:
            return
        for step in range(t * self.rl.updates, (t + 1) * self.rl.updates):
            batch = self._learn(step, draws.REPLAY)
            if self.network is None:
                both = torch.cat([batch.state, batch.action], 1)
                made = torch.cat([batch.state, both, batch.next_state], 1)
            else:
                made = self.network.features(batch)
            self.right.send(torch.cat([made, batch.outcome], 1))
            if self.network is not None:
                self.right.send(flat(self.network.phi, self.network.psi))

    def _learn(self, step: int, purpose: int) -> Batch:
        generator = draws.generator(self.rl.seed, purpose, step)
        batch = self.replay.draw(self.rl.batch_size, generator)
        if self.network is not None and self.adam is not None:
            loss = self.network.loss(batch)
            self.adam.zero_grad(set_to_none=True)
            loss.backward()
            self.adam.step()
            self.losses.append(loss.detach())
        return batch

    def mean_losses(self) -> dict[str, float]:
        """Since the last report."""
        losses, self.losses = self.losses, []
        return {"prediction": fmean(map(float, losses))} if losses else {}

    def unit(self) -> tuple[Unit, Optimizers] | None:
        """What a checkpoint keeps of the network; None without one."""
        if self.network is None or self.adam is None:
            return None
        return Unit("representation", {"representation": self.network}), {"adam": self.adam}


class Middle:
    """Part 1: the learner. It passes transitions on, and sends each actor's weights of update t."""

    def __init__(self, networks: Networks, left: Port, right: Port) -> None:
        rl = self.rl = networks.rl
        self.left, self.right = left, right
        self.learner = networks.learner()
        self.optimizers = self.learner.optimizers(rl.lr)
        self.copy = networks.representation()
        self.psi = Frozen(None if self.copy is None else self.copy.psi)
        self.sizes = [networks.z_s, networks.z_sa, networks.z_s, 2]
        """Of z_s, z_sa, z_s' and the outcome."""
        self.losses: list[sac.Losses] = []

    def pass_on(self) -> None:
        """A step's transitions, from the actors to the replay buffer."""
        self.left.send(self.right.receive())

    def learn(self, t: int) -> None:
        """The updates that follow step t."""
        if t < self.rl.random_rounds:
            return
        for step in range(t * self.rl.updates, (t + 1) * self.rl.updates):
            z_s, z_sa, next_z_s, outcome = self.left.receive().split(self.sizes, 1)
            if self.copy is not None:
                fill(self.left.receive(), self.copy.phi, self.copy.psi)
            batch = z_s, z_sa, next_z_s, outcome
            noise = draws.generator(self.rl.seed, draws.LEARNER, step)
            self.losses.append(sac.update(self.learner, self.optimizers, batch, self.psi, noise))
        phi = [] if self.copy is None else [self.copy.phi]
        self.right.send(flat(*phi, self.learner.policy))

    def mean_losses(self) -> dict[str, float]:
        """Since the last report, and the temperature of this moment."""
        losses, self.losses = self.losses, []
        if not losses:
            return {}
        means = (fmean(map(float, own)) for own in zip(*losses, strict=True))
        found = dict(zip(sac.Losses._fields, means, strict=True))
        return {**found, "alpha": float(self.learner.alpha)}

    def unit(self) -> tuple[Unit, Optimizers]:
        """What a checkpoint keeps; the copy of psi comes anew with the next batch."""
        return Unit("learner", {"learner": self.learner}), self.optimizers
