"""What every solver is written against: a block, its links, a window of mini-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from solvers.blocks.graphs import StepGraphs
from solvers.layers.projection import Projection

Rows = slice | Tensor
"""Which samples of a window: a slice in recorded order, or an int64 index."""

Shape = tuple[int, ...]

GraphBytes = Callable[[nn.Module, Tensor], int]
"""(module, its input) -> bytes that autograd keeps for the backward pass, parameters left out."""

T = TypeVar("T")


class Links(Protocol):
    """A block's connections to its neighbours and to everyone.

    Sends do not block; a receive blocks and names its neighbour, so a program's result does not
    depend on timing. A tensor handed over must not be written to afterwards, by either side.
    Strides are kept: a channels_last tensor arrives as channels_last.
    """

    rank: int
    size: int

    def to_next(self, tensor: Tensor) -> None: ...
    def from_previous(self) -> Tensor: ...
    def to_previous(self, tensor: Tensor) -> None: ...
    def from_next(self) -> Tensor: ...

    def flush(self) -> None:
        """Wait until every tensor sent so far has left."""

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Everyone's (small, picklable) value, in rank order, on every rank."""
        ...


class Source(Protocol):
    """Where mini-batches come from: images for the first block, labels for the last."""

    def images(self, ids: Tensor) -> Tensor:
        """Samples (N, C, H, W), augmented and normalised."""
        ...

    def labels(self, ids: Tensor) -> Tensor:
        """Classes (N,), int64."""
        ...


@dataclass(frozen=True)
class Batch:
    """One mini-batch: sample numbers (N,), and the learning rate of its step."""

    ids: Tensor
    learning_rate: float
    source: Source

    def __len__(self) -> int:
        return len(self.ids)

    def images(self) -> Tensor:
        """Samples (N, C, H, W); made anew at every call, so nobody need keep them."""
        return self.source.images(self.ids)

    def labels(self) -> Tensor:
        """Classes (N,)."""
        return self.source.labels(self.ids)


class Recorder(Protocol):
    """Keeps what an exact pass saw at a block's two cuts."""

    def record(
        self,
        rows: slice,
        lam: Tensor | None,
        p_in: Tensor | None,
        out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        """Keep input, input adjoint, output and output adjoint; None where there is no cut.

        Adjoints are in per-sample scale: the batch size times autograd's for the batch mean.
        """

    def carried_input(self, rows: Rows) -> Tensor | None:
        """The block's input of `rows` if a checkpoint gave it; None: what arrives is its input."""


@dataclass
class Window:
    """The mini-batches whose auxiliary variables live at once, as one rank sees them."""

    batches: list[Batch]
    sweeps: int = 1
    recorder: Recorder | None = None
    kept: bool = False
    """Whether the auxiliary variables outlive the window: its last sweep, too, exchanges them."""
    shuffle: Callable[[int], Tensor] | None = None
    """sweep -> permutation of the window's samples (per-sample storage); None: recorded order."""

    def recorded(self) -> Iterator[tuple[slice, Batch]]:
        """Rows and mini-batches as an exact pass meets them."""
        start = 0
        for batch in self.batches:
            yield slice(start, start + len(batch)), batch
            start += len(batch)

    def sweep(self, number: int) -> Iterator[tuple[Rows, Batch]]:
        """Rows and mini-batches of one sweep, the same on every rank."""
        if self.shuffle is None:
            yield from self.recorded()
            return
        ids = torch.cat([batch.ids for batch in self.batches])
        permutation = self.shuffle(number)
        for rows, batch in self.recorded():
            index = permutation[rows]
            yield index, Batch(ids[index], batch.learning_rate, batch.source)


@dataclass
class PhaseStats:
    """What one rank did in one phase; sums stay on the device until the phase has ended."""

    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each step; of the last block the training loss, else the coupling loss."""
    correct: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    """(||lam - x||^2, ||x||^2) of each step at the cut after this block."""
    exchanged: list[Tensor] = field(default_factory=list)
    """(||lam - x||^2, ||rho (lam - old lam)||^2) of each exchange at the cut before this block."""
    notices: list[str] = field(default_factory=list)
    """What a user should be told, the same on every rank."""

    def classified(self, logits: Tensor, labels: Tensor) -> None:
        """Count the right answers of one (micro-)batch."""
        self.correct.append((logits.detach().argmax(1) == labels).sum())

    def residual(self) -> float:
        """Relative primal residual ||lam_{k+1} - x_k|| / ||x_k||; 0 without a measured cut."""
        if not self.squares:
            return 0.0
        r, x = torch.stack(self.squares).double().sum(0).tolist()
        return float((r / x) ** 0.5) if x > 0 else 0.0

    def residual_norms(self) -> tuple[float, float] | None:
        """Norms of the primal and the dual residual at the cut before this block, if exchanged.

        ||lam - x|| after the step of lam, and ||rho (lam - old lam)||, with rho = 2 beta (Boyd et
        al., Foundations and Trends in Machine Learning 2011, section 3.3).
        """
        if not self.exchanged:
            return None
        r, s = torch.stack(self.exchanged).double().sum(0).sqrt().tolist()
        return float(r), float(s)

    def per_step_losses(self) -> list[float]:
        """One loss a step."""
        return [float(x) for x in torch.stack(self.losses).tolist()] if self.losses else []

    @contextmanager
    def timed(self, links: Links) -> Iterator[None]:
        """Add the time of the body, the work it left to a GPU included."""
        start = links.now()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.seconds += links.now() - start


@dataclass
class Block:
    """The contiguous run of units one rank owns, with its optimisers.

    `optimisers["exact"]` steps in exact passes; a solver steps with `optimisers["local"]`, which
    is the same object unless the solver keeps a momentum of its own.
    """

    module: nn.Module
    index: int
    count: int
    optimisers: dict[str, torch.optim.Optimizer]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: torch.dtype = torch.float32
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    cut_after: Projection | None = None
    """The next block's first layer, if it is a projection: what lam at that cut is held to."""
    rates: dict[str, float] = field(default_factory=lambda: {"exact": 1.0, "local": 1.0})
    """Factors of the learning rate by kind of step."""
    graphs: StepGraphs | None = None
    """Runs local steps as CUDA graphs; None: kernel by kernel."""
    scaler: torch.amp.GradScaler | None = field(init=False, default=None)
    """Keeps float16 gradients in range; other formats need none."""

    def __post_init__(self) -> None:
        if self.precision is torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.scale(torch.zeros((), device=self.device))  # which makes its scale

    @property
    def first(self) -> bool:
        """Whether this block's input is the image."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this block's output meets the labels."""
        return self.index == self.count - 1

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters, float32 without any."""
        parameter = next(self.module.parameters(), None)
        return torch.float32 if parameter is None else parameter.dtype

    def forward(self, lam: Tensor) -> Tensor:
        """x_k = f_k(lam_k; w_k), under autocast where the precision asks for it."""
        with self.numbers():
            out: Tensor = self.module(lam)
        narrow = self.precision is not torch.float32
        return out.float() if self.last and narrow else out

    def numbers(self) -> AbstractContextManager[Any]:
        """Within it torch computes in the block's precision."""
        if self.precision is torch.float32:
            return nullcontext()
        # weights are used once a pass, and what a cache keeps may not outlive a captured graph
        return torch.autocast(self.device.type, dtype=self.precision, cache_enabled=False)

    def step(self, kind: str, learning_rate: float) -> None:
        """One optimiser step on the gradients at hand, which it then clears."""
        optimiser = self.optimisers[kind]
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * self.rates[kind]
        if self.scaler is None:
            optimiser.step()
        elif self.gradients():
            self.scaler.step(optimiser)
            self.scaler.update()
        optimiser.zero_grad(set_to_none=True)

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies adjoints by: a power of two in float16, else 1.

        Each block has its own, which an overflow halves; that block then leaves out its step.
        """
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def backward(self, out: Tensor, p_out: Tensor | None = None) -> None:
        """Add `loss_scale` times the gradient to the parameters, from p_out = d loss / d out.

        Without p_out, `out` is the loss.
        """
        scale = self.loss_scale
        if scale == 1.0:
            out.backward(p_out)
        elif p_out is None:
            (out * scale).backward()
        else:
            out.backward((p_out * scale).to(out.dtype))

    def input_adjoint(self, lam: Tensor) -> Tensor | None:
        """d loss / d lam as `backward` has left it at the leaf lam, in lam's scale."""
        if lam.grad is None or self.scaler is None:
            return lam.grad
        return lam.grad.float() / self.loss_scale

    def sample_adjoint(self, lam: Tensor) -> Tensor | None:
        """`input_adjoint` of one sample's loss, not the mean's; 0 where float16 overflowed."""
        p = self.input_adjoint(lam)
        return None if p is None else self.kept_adjoint(p * len(lam))

    def kept_adjoint(self, p: Tensor) -> Tensor:
        """An adjoint that outlives its pass: an overflow may spoil a step, not what is stored."""
        return p if self.scaler is None else p.nan_to_num(0.0, 0.0, 0.0)

    def unscale(self, kind: str) -> None:
        """Take the scale out of the gradients before they are looked at; `step` does it else."""
        if self.scaler is not None and self.gradients():
            self.scaler.unscale_(self.optimisers[kind])

    def own_sgd(self, momentum: float) -> None:
        """Give local steps an SGD of their own, with the exact optimiser's weight decay."""
        self.optimisers["local"] = torch.optim.SGD(
            self.parameter_groups(), lr=0.0, momentum=momentum, nesterov=momentum > 0
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The exact optimiser's parameters and weight decay, for another optimiser."""
        groups = self.optimisers["exact"].param_groups
        return [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]

    def gradients(self) -> list[Tensor]:
        """The gradients at hand, in the order of the parameters."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]


class Solver(ABC):
    """A method: one rank's program. Each rank has its own copy, which may keep state."""

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether it trains alone; a solver that is not exact alternates with serial corrections."""
    standalone: ClassVar[bool] = False
    """Whether it needs neither correction nor records: a mini-batch is trained by it alone."""
    needs_images: ClassVar[bool] = False
    """Whether blocks behind the first one need the images, too."""
    needs_labels: ClassVar[bool] = False
    """Whether blocks before the last one need the labels, too."""

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:  # noqa: B027
        """Make what the rank's copy keeps between rounds (optimisers, stores).

        `exchanges`: auxiliary variables move between sweeps, not only weights.
        """

    def delay(self, index: int, count: int) -> int:
        """Ticks by which the gradients of block `index` of `count` are late."""
        return 0

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        """Most memory that block `index` of `count` holds for backward passes of its own steps.

        `lam` is a mini-batch at its input; `graph` tells what autograd keeps of a pass over it.
        """
        return graph(module, lam)

    def store_bytes(
        self, lam: Shape | None, out: Shape | None, samples: int, exchanges: bool
    ) -> int:
        """Memory of the auxiliary variables of `samples` samples on one rank.

        `lam` and `out` are one sample's shapes at the cut before and after the block.
        """
        return 0

    @property
    def recorder(self) -> Recorder | None:
        """Where an exact pass leaves its record; None: this method needs none."""
        return None

    @abstractmethod
    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Train on the window."""

    def drain(self, block: Block, links: Links) -> None:  # noqa: B027
        """Finish what is still under way between blocks; all ranks call it."""

    def flight_state(self, block: Block, links: Links) -> dict[str, Tensor]:
        """What a block has under way, or keeps of its own, for a checkpoint; all ranks call it."""
        return {}

    def load_flight_state(self, block: Block, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Take back what `flight_state` gave, by the same cuts."""

    def cut_state(self) -> dict[str, Tensor]:
        """What is kept between rounds of the cut before this block, for a checkpoint."""
        return {}

    def load_cut_state(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:  # noqa: B027
        """Take back what `cut_state` gave here (`before`) and on the next block (`after`).

        Empty for a cut that was not there: its auxiliary variables begin with a forward pass.
        """
