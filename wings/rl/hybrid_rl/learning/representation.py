"""OFENet: features of states and actions that are learned by predicting the next state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid_rl.learning.draws import initialize
from hybrid_rl.learning.networks import Dense
from hybrid_rl.learning.replay import Batch


class Representation(nn.Module):
    r"""z_s = phi(s),   z_sa = psi([z_s, a]),   min over phi, psi, P of mean || P z_sa - s' ||^2.

    After Ota et al. (arXiv 2003.01629, sections 3 and 4). phi and psi are dense blocks of L layers
    and U units in all each, of U / L a layer, so that

        dim z_s = dim s + U          dim z_sa = dim z_s + dim a + U

    P is linear. BatchNorm uses a batch's statistics only in this loss. It uses running statistics
    in the features for the learner, whose loss takes them as constants.
    """

    def __init__(
        self, states: int, actions: int, units: int, layers: int, draws: torch.Generator
    ) -> None:
        super().__init__()
        own = [units // layers] * layers
        self.phi = Dense(states, own, normalized=True)
        self.psi = Dense(self.phi.outputs + actions, own, normalized=True)
        self.predictor = nn.Linear(self.psi.outputs, states)
        initialize(self, draws)
        self.eval()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a mini-batch, by its own statistics."""
        self.train()
        z_sa = self.psi(torch.cat([self.phi(batch.state), batch.action], 1))
        found: Tensor = (self.predictor(z_sa) - batch.next_state).square().sum(1).mean()
        self.eval()
        return found

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """(N, dim z_s + dim z_sa + dim z_s): z_s, z_sa and z_s' by the running statistics."""
        both = torch.cat([batch.state, batch.next_state])
        z_s, next_z_s = self.phi(both).chunk(2)
        z_sa = self.psi(torch.cat([z_s, batch.action], 1))
        return torch.cat([z_s, z_sa, next_z_s], 1)


class Frozen(nn.Module):
    """A copy of psi with which the learner rates actions that are not in the batch.

    Gradients pass through it to the actions, but not to its weights. Without a representation it
    returns [z_s, a].
    """

    def __init__(self, psi: Dense | None) -> None:
        super().__init__()
        self.psi = psi
        if psi is not None:
            psi.eval().requires_grad_(False)

    def forward(self, z_s: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([z_s, action], 1)
        found: Tensor = both if self.psi is None else self.psi(both)
        return found
