"""The interface between training and any data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from hybrid.solvers.blocks.metrics import LEFT_OUT
from hybrid.solvers.layers.bundle import Bundle


class Data(ABC):
    """Samples by number: a pure function of (seed, epoch, number), on every rank that asks.

    Number n is sample n mod N of the N there are. Where a sampler takes a sample several times in
    an epoch it asks for n, n + N, n + 2 N, ...: what is drawn for the sample differs each time.
    """

    inputs: Bundle | None = None
    """The structure of the network's inputs, if they are not one tensor."""
    answers: Bundle | None = None
    """The structure of the targets, if they are not one tensor."""
    joint: bool = False
    """Whether a replica's share of a mini-batch is made at once, of which parts are then taken."""
    augmented: bool = False
    """Whether augmentation makes other samples in every epoch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
        """The network's inputs for the samples of numbers `ids`, int64 (B,): (B, ...)."""

    @abstractmethod
    def targets(self, ids: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
        """The targets of those samples: (B, ...)."""

    @abstractmethod
    def sample(self, count: int) -> tuple[Any, Any]:
        """Inputs and targets like those of `count` samples, as the network and the loss get them.

        They serve to learn shapes, so their values may be made up.
        """

    def expect_classes(self, count: int) -> None:  # noqa: B027
        """Expect targets to be classes below `count`, or LEFT_OUT; 0: expect nothing.

        Raises ValueError for any other target; `targets` raises it where they are not known yet.
        """

    def leaves_out(self, target: int) -> bool:
        """Whether some target may be this one, which the loss leaves out."""
        return True

    def expect(self, batches: list[Tensor], seed: int, epoch: int) -> None:  # noqa: B027
        """Called with the mini-batches that will be asked for, in their order."""

    def only(self, images: bool, labels: bool) -> Data:
        """The data set for a rank that asks for inputs, for targets, for both or for neither."""
        return self

    def close(self) -> None:  # noqa: B027
        """Close what was opened to read samples."""


def check_classes(targets: Tensor, count: int, ids: Tensor | None = None) -> None:
    """ValueError for a target (N, ...) that is no class below `count`; its sample is ids[i], or i.

    LEFT_OUT is none, and allowed.
    """
    wrong = ((targets < 0) & (targets != LEFT_OUT)) | (targets >= count)
    if not wrong.any():
        return
    row = int(wrong.flatten(1).any(1).nonzero()[0] if wrong.dim() > 1 else wrong.nonzero()[0])
    raise ValueError(
        f"sample {row if ids is None else int(ids[row])} of the data set has the target "
        f"{int(targets[row][wrong[row]].flatten()[0])}, but the network's output has {count} "
        f"classes, 0 to {count - 1}: correct it, or give the network more outputs"
    )
