"""The base classes of samplers: their settings, and the choices that they start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.solvers.acting import Count, Needs, Settings
from hybrid.solvers.state import State

FREE = Needs(
    "the data leave the order of samples open, as a DataLoader does with shuffle=True, and a "
    "stream or another sampler of torch's does not",
    lambda run: not run.ordered or run.sampler.keeps_order,
    "give a DataLoader with shuffle=True, or set sampler.name=uniform, which keeps that order",
)


@dataclass(frozen=True)
class Sampler(Settings, ABC):
    """Who chooses the samples of a mini-batch: a frozen dataclass of its settings."""

    name: ClassVar[str]
    keeps_order: ClassVar[bool] = False
    """Whether it takes the order that the data have, where they have one."""
    needs: ClassVar[tuple[Needs, ...]] = (FREE,)
    """What must hold in a run with it, see `hybrid.solvers.acting`."""

    @abstractmethod
    def start(self, data: Data, seed: int) -> "Choice":
        """What chooses from a data set."""


@dataclass(frozen=True)
class Learning(Sampler):
    """A sampler that learns from the losses that its samples had.

    It lives on one rank, which sends its choice to the others. The losses of mini-batch n are
    known when mini-batch n + lag is chosen, on any grid of ranks, and not before.
    """

    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            "a window is a number of mini-batches, because losses come after an epoch of window "
            "'all' has been chosen",
            lambda run: run.rounds.window != "all",
            "give rounds.window a number, or set sampler.name=uniform",
        ),
        Needs(
            "sampler.lag is at least rounds.window, since its mini-batches are chosen together",
            lambda run: run.sampler.lag >= run.setup.window,
            "set a larger sampler.lag, or a smaller rounds.window",
            here=lambda run: f"it is {run.sampler.lag} of {run.setup.window}",
        ),
        Needs(
            "the solver reports the losses of all samples in the order of their mini-batches, as "
            "threads without an order do not",
            lambda run: run.solver.reports_losses,
            "take another solver, or sampler.name=uniform",
        ),
        Needs(
            "every sample has a loss, in windows that are recorded or in serial rounds alone",
            lambda run: (
                not run.solver.alternates or run.solver.records or run.rounds.correct_every == 1
            ),
            "take another solver, rounds.correct_every=1, or sampler.name=uniform",
        ),
    )

    lag: Count = 16
    """Mini-batches until a loss is learned; at least rounds.window."""


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> Tensor:
    """A tensor of a sampler's checkpoint, on the CPU; ValueError for another type or shape.

    None in a shape stands for any length.
    """
    fits = tensor.dim() == len(shape) and all(
        length in (None, size) for length, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"the sampler's {name} is {tuple(tensor.shape)} of {tensor.dtype}; it must be "
            f"({sizes}) of {dtype}"
        )
    return tensor.cpu()


def check_ids(name: str, ids: Tensor, length: int | None, count: int) -> Tensor:
    """A checkpoint's numbers of samples, (length,); ValueError unless they are of `count` ones."""
    checked = check_tensor(name, ids, torch.int64, (length,))
    wrong = checked[(checked < 0) | (checked >= count)]
    if len(wrong):
        raise ValueError(
            f"the sampler's {name} has sample {int(wrong[0])} of a data set of {count}; they must "
            f"be from 0 to {count - 1}"
        )
    return checked


class Choice(ABC):
    """Chooses which of a data set's samples make which mini-batch."""

    repeats: ClassVar[bool] = True
    """Whether it may take a sample more than once in an epoch."""

    def __init__(self, data: Data, seed: int) -> None:
        self.data, self.count, self.seed = data, len(data), seed

    @abstractmethod
    def choose(self, epoch: int, first: int, count: int) -> Tensor:
        """Ids (count,), int64, of the samples first .. first + count - 1 of an epoch.

        For a sampler that learns it is called for one mini-batch after the other, and may be
        called again for those of this epoch.
        """

    def learn(self, ids: Tensor, losses: Tensor) -> None:  # noqa: B027
        """Learn from a mini-batch's samples (N,) and their losses (N,), float32, in their order."""

    def batches(self, batch_size: int) -> int:
        """Mini-batches of an epoch; an incomplete last one is left out."""
        return self.count // batch_size

    def epoch_statistics(self) -> dict[str, Any]:
        """Statistics of an epoch for the metrics, as JSON values; may be empty."""
        return {}

    def state(self) -> State:
        """The state for a checkpoint. A sampler that learns puts all of it into `block`."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Restore a state."""
