"""Soft actor-critic on features: twin critics, their targets, a policy and its temperature."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rl.learning.networks import Head, Policy

Features = Callable[[Tensor, Tensor], Tensor]
"""psi, which maps z_s and actions to z_sa."""


class Losses(NamedTuple):
    """Of one update."""

    critic: Tensor
    policy: Tensor
    entropy: Tensor
    """The mean of -log pi over the batch, in nats."""


class Learner(nn.Module):
    r"""Soft actor-critic (Haarnoja et al., arXiv 1812.05905) on z_s and z_sa, which are constants.

        y      = r + gamma (1 - d) (min_j Q'_j(psi(z_s', a')) - alpha log pi(a' | z_s')),  a' ~ pi
        critic   sum_j mean (Q_j(z_sa) - y)^2
        policy   mean (alpha log pi(a | z_s) - min_j Q_j(psi(z_s, a))),                    a ~ pi
        alpha    - log alpha mean (log pi(a | z_s) + H),   H = - dim a: the entropy that is wanted
        Q'_j  <- Q'_j + tau (Q_j - Q'_j)

    Adam steps each of the three in this order. The gradient with respect to a passes through psi,
    whose weights get none.
    """

    def __init__(
        self,
        policy: Policy,
        critics: tuple[Head, Head],
        discount: float,
        polyak: float,
    ) -> None:
        super().__init__()
        self.critics, self.policy = nn.ModuleList(critics), policy
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.discount, self.polyak = discount, polyak
        self.wanted_entropy = -policy.actions

    def optimizers(self, lr: float) -> dict[str, torch.optim.Optimizer]:
        """An optimizer for each loss."""
        parts = {
            "critic": list(self.critics.parameters()),
            "policy": list(self.policy.parameters()),
            "alpha": [self.log_alpha],
        }
        return {name: torch.optim.Adam(own, lr, fused=True) for name, own in parts.items()}

    @property
    def alpha(self) -> Tensor:
        """The weight of the entropy, a constant in the other losses."""
        return self.log_alpha.detach().exp()

    def value(self, critics: nn.ModuleList, z_sa: Tensor) -> Tensor:
        """The smaller value of the two critics, (N, 1)."""
        return torch.minimum(critics[0](z_sa), critics[1](z_sa))

    @torch.no_grad()
    def target(self, outcome: Tensor, next_z_s: Tensor, noise: Tensor, psi: Features) -> Tensor:
        """y, (N, 1), for rewards and ends (N, 2)."""
        reward, terminated = outcome.split(1, 1)
        action, log_pi = self.policy(next_z_s, noise)
        soft = self.value(self.targets, psi(next_z_s, action)) - self.alpha * log_pi
        found: Tensor = reward + self.discount * (1 - terminated) * soft
        return found

    def critic_loss(self, z_sa: Tensor, y: Tensor) -> Tensor:
        """The loss of both critics."""
        first, second = ((critic(z_sa) - y).square().mean() for critic in self.critics)
        found: Tensor = first + second
        return found

    def policy_loss(self, z_s: Tensor, noise: Tensor, psi: Features) -> tuple[Tensor, Tensor]:
        """The loss of the policy, and log pi, (N, 1), of the actions that it took."""
        action, log_pi = self.policy(z_s, noise)
        value = self.value(self.critics, psi(z_s, action))
        return (self.alpha * log_pi - value).mean(), log_pi.detach()

    def alpha_loss(self, log_pi: Tensor) -> Tensor:
        """The loss of log alpha, which rises while the entropy is below the wanted one."""
        return -self.log_alpha * (log_pi + self.wanted_entropy).mean()

    @torch.no_grad()
    def follow(self) -> None:
        """Q'_j <- Q'_j + tau (Q_j - Q'_j)."""
        targets: list[Tensor] = list(self.targets.parameters())
        torch._foreach_lerp_(targets, list[Tensor](self.critics.parameters()), self.polyak)


def update(
    learner: Learner,
    optimizers: dict[str, torch.optim.Optimizer],
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    psi: Features,
    draws: torch.Generator,
) -> Losses:
    """One step of critics, policy, temperature and targets on (z_s, z_sa, z_s', outcome)."""
    z_s, z_sa, next_z_s, outcome = batch
    shape = (2, len(z_s), learner.policy.actions)
    noises = torch.randn(shape, generator=draws, dtype=z_s.dtype)
    critic = learner.critic_loss(z_sa, learner.target(outcome, next_z_s, noises[0], psi))
    _step(optimizers["critic"], critic)
    learner.critics.requires_grad_(False)  # the policy's loss needs none of theirs
    policy, log_pi = learner.policy_loss(z_s, noises[1], psi)
    _step(optimizers["policy"], policy)
    learner.critics.requires_grad_(True)
    _step(optimizers["alpha"], learner.alpha_loss(log_pi))
    learner.follow()
    return Losses(critic.detach(), policy.detach(), -log_pi.mean())


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
