"""The base of samplers that accept or reject one candidate after the other."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.data.samplers.base import Choice, check_ids, check_tensor
from hybrid.data.sampling import kept_order, uniform
from hybrid.solvers.state import State

_STREAM = 1000
"""The first permutation of an epoch draws random numbers from this stream, the next from the one
after it."""


class Accepting(Choice):
    """Candidate i is accepted if u_i < P(i), u_i uniform by (seed, epoch, i, permutation).

    Candidates come in the order of the epoch's permutation, and when that is through of another
    one: a rejected sample is replaced by the next candidate, so mini-batches keep their size and
    an epoch its length, in passes of the network. Where P is 1 it is the epoch's permutation.
    """

    def __init__(self, data: Data, seed: int) -> None:
        super().__init__(data, seed)
        self._epoch = -1
        self._permutation = self._next = 0
        """The number of the permutation in the epoch, and the place of its next candidate."""
        self._chosen = torch.empty(0, dtype=torch.int64)
        """The samples chosen in this epoch."""

    @abstractmethod
    def probabilities(self, ids: Tensor) -> Tensor:
        """P (N,), float64, of candidates that are looked at now, in their order."""

    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch, self._permutation, self._next = epoch, 0, 0
            self._chosen = self._chosen[:0]
        while len(self._chosen) < first + count:
            self._extend(first + count - len(self._chosen))
        return self._chosen[first : first + count]

    def _extend(self, missing: int) -> None:
        """Look at as many candidates as samples are missing, of one permutation."""
        order = kept_order(self.seed, self._epoch, self.count, self._permutation)
        ids = order[self._next : self._next + missing]
        u = uniform(self.seed, self._epoch, ids, _STREAM + self._permutation)
        p = self.probabilities(ids)
        if not bool(p.isfinite().all()):
            raise ValueError(
                f"the sampler's probability for sample {int(ids[~p.isfinite()][0])} is not finite: "
                "its inputs, or what the sampler has learned, are not; take a smaller sampler.lr"
            )
        self._chosen = torch.cat([self._chosen, ids[u < p]])
        self._next += len(ids)
        if self._next == self.count:
            self._permutation, self._next = self._permutation + 1, 0

    @property
    def _candidates(self) -> int:
        """Those that were looked at in this epoch."""
        return self._permutation * self.count + self._next

    def epoch_statistics(self) -> dict[str, Any]:
        accepted = len(self._chosen) / max(1, self._candidates)
        return {"candidates": self._candidates, "accepted": accepted}

    def state(self) -> State:
        where = torch.tensor([self._epoch, self._permutation, self._next])
        return State(block={"where": where, "chosen": self._chosen})

    def load_state(self, state: State) -> None:
        if "where" not in state.block:
            return
        where = check_tensor("where", state.block["where"], torch.int64, (3,))
        self._epoch, self._permutation, self._next = where.tolist()
        self._chosen = check_ids("chosen", state.block["chosen"], None, self.count)
        fits = self._permutation >= 0 and 0 <= self._next < self.count
        if not fits or len(self._chosen) > self._candidates:
            raise ValueError(
                f"the sampler's where is {where.tolist()} with {len(self._chosen)} samples chosen; "
                f"it must be an epoch, a permutation and a place from 0 to {self.count - 1} in it, "
                "with at least as many candidates before it"
            )
