"""Selective-Backprop: samples of large loss are chosen more often (arXiv 1910.00762)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.data.samplers.base import Choice, Learning, check_tensor
from hybrid.solvers.acting import Allowed, Count
from hybrid.solvers.state import State
from hybrid_samplers.accepting import Accepting

Selectivity = Annotated[
    float,
    Allowed("lie in [0, 10], where 10 accepts one candidate of 11", lambda beta: 0 <= beta <= 10),
]


@dataclass(frozen=True)
class SelectiveBackprop(Learning):
    r"""Accept a sample by the percentile of its loss (arXiv 1910.00762, section 3).

    With l_i the loss that sample i had when it was last trained on, and H the last losses of
    candidates, accepted or not:

        P(i) = (|{l in H : l <= l_i}| / |H|)^beta        1 for a sample that has had no loss yet

    About 1 / (1 + beta) of the candidates are accepted. As in the paper's StaleSB the losses are
    old: no sample is passed forward to be chosen, which costs nothing, and one that is rejected
    keeps the loss it had. beta = 0 accepts every one.
    """

    name: ClassVar[str] = "selective-backprop"

    beta: Selectivity = 1.0
    """Selectivity: larger values skip more samples of small loss; 0: none."""
    history: Count = 1024
    """Number of recent losses that a loss is ranked against."""

    def start(self, data: Data, seed: int) -> Choice:
        return _ByLoss(data, seed, self)


class _ByLoss(Accepting):
    def __init__(self, data: Data, seed: int, settings: SelectiveBackprop) -> None:
        super().__init__(data, seed)
        self.settings = settings
        self._losses = torch.full((self.count,), torch.nan)
        """l_i; nan: none yet."""
        self._history = torch.empty(0)
        """H, the newest last."""

    def probabilities(self, ids: Tensor) -> Tensor:
        l = self._losses[ids]  # noqa: E741
        has_loss = ~l.isnan()
        self._history = torch.cat([self._history, l[has_loss]])[-self.settings.history :]
        among = self._history.sort().values
        below = torch.searchsorted(among, l[has_loss], right=True).double()
        p = torch.ones(len(ids), dtype=torch.float64)
        p[has_loss] = (below / max(1, len(among))) ** self.settings.beta
        return p

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        self._losses[ids] = losses

    def state(self) -> State:
        state = super().state()
        state.block |= {"losses": self._losses, "history": self._history}
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if "losses" in state.block:
            losses, history = state.block["losses"], state.block["history"]
            self._losses = check_tensor("losses", losses, torch.float32, (self.count,))
            self._history = check_tensor("history", history, torch.float32, (None,))
