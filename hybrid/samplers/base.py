"""What a sampler is: the same choice on every rank, without talking."""

from abc import ABC, abstractmethod

from torch import Tensor

from solvers.state import State


class Sampler(ABC):
    """Chooses which of `count` training samples make which mini-batch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    @abstractmethod
    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        """Ids (count,), int64, of the samples first .. first + count - 1 of an epoch."""

    def batches(self, batch_size: int) -> int:
        """Mini-batches an epoch; an incomplete last one is left out."""
        return self.count // batch_size

    def state(self) -> State:
        """For a checkpoint: what all ranks share."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Take back what `state` gave."""
