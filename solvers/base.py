"""What every solver is written against, and what it is: settings that start a rank's program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor, nn

from solvers.acting import HAVE_TIME, Acts, Needs, Settings
from solvers.blocks.block import Block
from solvers.state import State, Tensors
from solvers.windows import Batch, PhaseStats, Record, Rows, Window

Shape = tuple[int, ...]

GraphBytes = Callable[[nn.Module, Tensor], int]
"""(module, its input) -> bytes that autograd keeps for the backward pass, parameters left out."""

Side = Literal["next", "previous"]
"""A neighbor."""

T = TypeVar("T")
P = TypeVar("P", bound="Program")


class Links(Protocol):
    """A block's connections to its neighbors and to everyone.

    Sends do not block; a receive blocks and names its neighbor, so a program's result does not
    depend on timing. A tensor handed over must not be written to afterwards, by either side.
    Strides are kept: a channels_last tensor arrives as channels_last.
    """

    rank: int
    size: int
    clocked: bool
    """Whether its clock counts the work of one thread for each rank alone."""

    def to_next(self, tensor: Tensor) -> None: ...
    def from_previous(self) -> Tensor: ...
    def to_previous(self, tensor: Tensor) -> None: ...
    def from_next(self) -> Tensor: ...

    def has_message(self, side: Side) -> bool:
        """Whether a tensor of that neighbor has come; only a method without an order asks."""
        ...

    def wait_any(self, *sides: Side) -> Side:
        """Wait until a tensor has come from one of them; which, the first if several have."""
        ...

    def flush(self) -> None:
        """Wait until every tensor sent to neighbors so far has left."""

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """The (small, picklable) value of every block of this replica, in order."""
        ...

    def agree(self, value: T) -> list[T]:
        """Likewise of the first replica's blocks, on every replica: what a decision is made on."""
        ...


@dataclass(frozen=True)
class Setup:
    """What a run is, settled before training, the same on every rank."""

    shapes: tuple[Shape, ...] = ()
    """One sample's at the cuts k = 1 .. K-1."""
    batch_size: int = 1
    """Samples of a mini-batch; of one replica's share, where there are replicas."""
    window: int = 0
    """Mini-batches whose auxiliary variables live at once; 0: none do."""
    sweeps: int = 1
    """Passes over a window's sub-problems."""
    carried: bool = False
    """Whether the auxiliary variables outlive their window."""
    fills: bool = False
    """Whether local steps fill the gaps of the exact pass."""
    own_fill: bool = False
    """Whether they step by themselves, not together with the exact gradient."""
    correct_every: int = 1
    """Rounds from one serial phase to the next; 0: there is none."""
    serial_steps: int = 0
    """Steps at the start, in rounds that are serial alone."""
    factorized: frozenset[int] = frozenset()
    """Cuts with a factorization."""
    compiled: bool = False
    """Whether the blocks are compiled."""
    output: Shape | None = None
    """One sample's of the network; None: not known, or several tensors."""
    several_outputs: bool = False
    """Whether the network gives several tensors."""
    packed: frozenset[int] = frozenset()
    """The cuts that several tensors cross."""
    bundled: bool = False
    """Whether several tensors go into a block at once."""
    total: int = 0
    """Samples of a mini-batch on all replicas; 0: there is one."""
    replicas: int = 1
    """R."""
    seed: int = 0
    """Of what a method draws by itself."""

    @property
    def blocks(self) -> int:
        """K."""
        return len(self.shapes) + 1

    @property
    def samples(self) -> int:
        """Of a window."""
        return self.window * self.batch_size

    @property
    def corrects(self) -> bool:
        """Whether there are serial phases at all."""
        return self.correct_every > 0 or self.serial_steps > 0

    @property
    def exchanges(self) -> bool:
        """Whether auxiliary variables move between sweeps, not only weights."""
        return self.window > 0 and (self.sweeps > 1 or self.carried)

    def shape_before(self, index: int) -> Shape | None:
        """One sample's at the cut before block `index`; None for the first block."""
        return self.shapes[index - 1] if index > 0 else None

    def shape_after(self, index: int) -> Shape | None:
        """One sample's at the cut after block `index`; None for the last block."""
        return self.shapes[index] if index < len(self.shapes) else None


class Program(ABC):
    """One rank's run of a method: everything it keeps, from its first step to its last."""

    def __init__(self, solver: Any, block: Block, links: Links, setup: Setup) -> None:
        self.solver, self.block, self.links, self.setup = solver, block, links, setup
        self.begin()

    def begin(self) -> None:  # noqa: B027
        """Make what this rank keeps."""

    @abstractmethod
    def train(self, window: Window) -> PhaseStats:
        """Train on the window."""

    def drain(self) -> PhaseStats:
        """Finish what is still under way between blocks; all ranks call it.

        Gives what `train` has not told of it.
        """
        return PhaseStats()

    def state(self) -> State:
        """For a checkpoint; all ranks call it."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Take back what `state` gave. A cut that was not there has nothing."""


class Recorder(Protocol):
    """Keeps what an exact pass saw at a block's two cuts."""

    def record(self, record: Record) -> None: ...

    def carried_input(self, rows: Rows) -> Tensor | None:
        """The block's input of `rows` if a checkpoint gave it; None: what arrives is its input."""


class Recording(Program, Recorder):
    """A program of a method that starts from what an exact pass has recorded."""


class SubProblems(Recording):
    """One whose sub-problems can fill gaps: they are static, and need no neighbor."""

    local_lr: float
    clip_norm: float

    @abstractmethod
    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> object:
        """Leave the local loss's gradient in the parameters; `visit` tells draws apart."""

    @abstractmethod
    def records(self) -> Tensors:
        """All that is stored, by name."""

    @abstractmethod
    def load_records(self, records: Tensors) -> None:
        """Take back what `records` gave."""


class Solver(Settings, ABC):
    """A method: a frozen dataclass of its settings. What a rank keeps is in its `Program`.

    One that `alternates` sweeps over every window that a serial correction has gone over before;
    its program may be a `Recording`. Any other trains on mini-batches alone, and whole windows of
    correction in between are optional.
    """

    name: ClassVar[str]
    program: ClassVar[type[Program]]
    """What a rank runs; `program_of` sets it."""
    exact: ClassVar[bool] = False
    """Whether its steps are on the exact gradient, so that a correction can add nothing."""
    alternates: ClassVar[bool] = False
    """Whether it sweeps over windows, by turns with a serial correction."""
    sweeps: ClassVar[int] = 1
    """Sweeps over a window where none are asked for."""
    fills: ClassVar[bool] = False
    """Whether its sub-problems can fill the gaps of the exact pass."""
    factorizes: ClassVar[bool] = False
    """Whether it can train a factorization at a cut."""
    captures: ClassVar[bool] = False
    """Whether its local steps can be CUDA graphs."""
    has_auxiliary_weights: ClassVar[bool] = False
    """Whether weights that are not the network's are trained with it."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """"images", "labels": what blocks that are neither first nor last need of a batch."""

    needs: ClassVar[tuple[Needs, ...]] = ()
    """What must hold in a run, whatever the settings are."""
    acts: ClassVar[Mapping[str, Acts]] = {
        "solver.*": Acts(HAVE_TIME.where, lambda run: run.setup.window or HAVE_TIME.holds(run))
    }
    """Conditions of inherited settings, see `solvers.acting`."""

    def check(self, setup: Setup) -> None:
        """ValueError, with the remedy, for what cannot work in this run and no type can say."""

    @property
    def records(self) -> bool:
        """Whether its program starts from what an exact pass has recorded."""
        return issubclass(self.program, Recording)

    @property
    def own_momentum(self) -> bool:
        """Whether its steps leave the exact steps' momentum alone."""
        return getattr(self, "momentum", None) is not None

    @property
    def repeatable(self) -> bool:
        """Whether the same run gives the same bits."""
        return True

    @property
    def reports_losses(self) -> bool:
        """Whether the last block meets every sample, in the order of the mini-batches."""
        return self.repeatable

    def parts(self, size: int) -> int:
        """Micro-batches of a mini-batch of `size` samples, in its own steps."""
        return 1

    def delay(self, index: int, count: int) -> int:
        """Micro-batches by which the gradients of block `index` of `count` are late."""
        return 0

    def progress(self, count: int, size: int) -> float | None:
        """Of a step on `size` samples over an exact one's, in `count` blocks; None: not known."""
        return None

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        """Most memory that block `index` of `count` holds for backward passes of its own steps.

        `lam` is a mini-batch at its input; `graph` tells what autograd keeps of a pass over it.
        """
        return graph(module, lam)

    def memory(self, setup: Setup, index: int) -> int:
        """Bytes of the auxiliary variables that block `index` stores."""
        return 0

    def layout(self) -> list[object]:
        """What the shapes of its auxiliary variables depend on, but for the cuts."""
        return []

    def start(self, block: Block, links: Links, setup: Setup) -> Program:
        """This rank's program."""
        return self.program(self, block, links, setup)


def program_of(solver: type[Solver]) -> Callable[[type[P]], type[P]]:
    """Make a class the program of a method."""

    def made(program: type[P]) -> type[P]:
        solver.program = program
        return program

    return made


def values_of(shape: Shape | None) -> int:
    """Numbers in one sample; 0 where there is no cut."""
    return 0 if shape is None else prod(shape)
