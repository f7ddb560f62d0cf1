"""The base classes of samplers: their settings, and the choices that they start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.data.sampling import kept_order, uniform
from hybrid.solvers.acting import Count, Needs, Settings
from hybrid.solvers.state import State

_STREAM = 1000
"""The first permutation of an epoch draws random numbers from this stream, the next from the one
after it."""


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
