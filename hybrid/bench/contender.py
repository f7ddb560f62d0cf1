"""What a bench compares: ways to train one network."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from solvers import Batch

CPU = torch.device("cpu")


class Contender(Protocol):
    """One way to train the network, and a row of the table. All ranks have one each."""

    def train(self, batches: Sequence[Batch]) -> None:
        """One optimiser step a mini-batch; every rank calls it with the same mini-batches."""

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole network's state under its global names, on rank 0 only. All must call it."""

    def bytes_sent(self) -> float:
        """Bytes this rank has sent in `train` so far."""
        ...

    def waiting_seconds(self) -> float:
        """Time in `train` in which this rank had nothing to do."""
        ...

    def close(self) -> None:
        """Let go of the network and what belongs to it, if it is much."""
        return
