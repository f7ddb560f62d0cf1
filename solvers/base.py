"""The base of every solver: its settings, a rank's program, and the links it is written against."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from hybrid.solvers.acting import Acts, Needs, Settings
from hybrid.solvers.block import Block
from hybrid.solvers.state import State, Tensors
from hybrid.solvers.windows import Batch, PhaseStats, Record, Rows, Window

Shape = tuple[int, ...]

GraphBytes = Callable[[nn.Module, Tensor], int]
"""(module, its input) -> bytes that autograd keeps for the backward pass, without parameters."""

T = TypeVar("T")
P = TypeVar("P", bound="Program")


class Links(Protocol):
    """A block's connections to its neighbors and to all ranks.

    A send does not block. A receive blocks and names its neighbor, so a program's result does not
    depend on timing. After a send neither side may write to the tensor. Strides are kept: a
    channels_last tensor arrives as channels_last.
    """

    rank: int
    size: int
    clocked: bool
    """Whether its clock counts the work of a single thread of each rank."""

    def to_next(self, tensor: Tensor) -> None: ...
    def from_previous(self) -> Tensor: ...
    def to_previous(self, tensor: Tensor) -> None: ...
    def from_next(self) -> Tensor: ...

    def to_block(self, block: int, tensor: Tensor) -> None:
        """Send to any block, beside what goes to neighbors."""

    def from_block(self, block: int) -> Tensor: ...

    def meet(self, blocks: Sequence[int]) -> None:
        """Prepare messages between some blocks; each of them calls it."""

    def flush(self) -> None:
        """Wait until every tensor sent to neighbors so far has left."""

    def now(self) -> float:
        """Seconds on this rank's clock, from an arbitrary start."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Gather a small value of each block of this replica, in order."""
        ...

    def agree(self, value: T) -> list[T]:
        """Gather the first replica's values on every replica, for a common decision."""
        ...


@dataclass(frozen=True)
class Setup:
    """The facts of a run that are fixed before training, the same on every rank."""

    shapes: tuple[Shape, ...] = ()
    """The shape of one sample at the cuts k = 1 .. K-1."""
    batch_size: int = 1
    """Samples of a mini-batch, or of one replica's share of it."""
    stored_batches: int = 0
    """Mini-batches whose auxiliary variables a rank stores at once; 0: there are none."""
    sweeps: int = 1
    """Passes over a window's sub-problems."""
    carried: bool = False
    """Whether the auxiliary variables outlive their window."""
    window: int = 1
    """Mini-batches of a round."""
    local_work: bool = False
    """Whether ranks take local steps where they would wait."""
    correct_every: int = 1
    """Rounds from one serial phase to the next; 0: there is none."""
    serial_steps: int = 0
    """Steps at the start, in rounds that are only serial."""
    serial_end: bool = False
    """Whether the last round of an epoch is only serial."""
    compiled: bool = False
    """Whether the blocks are compiled."""
    output: Shape | None = None
    """The shape of one sample's output; None: it is unknown, or several tensors."""
    several_outputs: bool = False
    """Whether the network's output is several tensors."""
    packed: frozenset[int] = frozenset()
    """The cuts that several tensors cross."""
    integer_cuts: tuple[str, ...] = ()
    """The first units behind cuts that integers or booleans cross."""
    bundled: bool = False
    """Whether the input of some block is several tensors."""
    total: int = 0
    """Samples of a mini-batch on all replicas; 0: there is one replica."""
    replicas: int = 1
    """R."""
    seed: int = 0
    """The seed of a method's random numbers."""

    @property
    def blocks(self) -> int:
        """K."""
        return len(self.shapes) + 1

    @property
    def samples(self) -> int:
        """Samples whose auxiliary variables are stored."""
        return self.stored_batches * self.batch_size

    @property
    def corrects(self) -> bool:
        """Whether there is any serial phase."""
        return self.correct_every > 0 or self.serial_steps > 0 or self.serial_end

    @property
    def exchanges(self) -> bool:
        """Whether auxiliary variables move between sweeps, not only weights."""
        return self.stored_batches > 0 and (self.sweeps > 1 or self.carried)

    def shape_before(self, index: int) -> Shape | None:
        """The shape of one sample at the cut before block `index`; None for the first block."""
        return self.shapes[index - 1] if index > 0 else None

    def shape_after(self, index: int) -> Shape | None:
        """The shape of one sample at the cut after block `index`; None for the last block."""
        return self.shapes[index] if index < len(self.shapes) else None


class Program(ABC):
    """One rank's run of a method, with all its state from the first step to the last."""

    def __init__(self, solver: Any, block: Block, links: Links, setup: Setup) -> None:
        self.solver, self.block, self.links, self.setup = solver, block, links, setup
        self.begin()

    def begin(self) -> None:  # noqa: B027
        """Create this rank's state."""

    @abstractmethod
    def train(self, window: Window) -> PhaseStats:
        """Train on the window."""

    def drain(self) -> PhaseStats:
        """Finish what is still under way between blocks; all ranks call it.

        Gives the statistics that `train` has not reported.
        """
        return PhaseStats()

    def state(self) -> State:
        """This rank's state for a checkpoint; all ranks call it."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Restore a state; it is empty for a cut that did not exist."""


class Recorder(Protocol):
    """Records activations and adjoints of an exact pass at a block's two cuts."""

    def record(self, record: Record) -> None: ...

    def carried_input(self, rows: Rows) -> Tensor | None:
        """The block's input of `rows`, if a checkpoint gave it; None: the pass gives it."""


class Recording(Program, Recorder):
    """A program that starts from the records of an exact pass."""


class SubProblems(Recording):
    """A program whose sub-problems can be local work: they are static and need no neighbor."""

    local_lr: float
    clip_norm: float

    @abstractmethod
    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> object:
        """Leave the local loss's gradient in the parameters.

        Random layers draw other numbers for another `visit`.
        """

    @abstractmethod
    def records(self) -> Tensors:
        """All stored records, by name."""

    @abstractmethod
    def load_records(self, records: Tensors) -> None:
        """Restore stored records."""


class Solver(Settings, ABC):
    """A method: a frozen dataclass of its settings. All state is in its `Program`.

    A method that `alternates` sweeps over every window after a serial correction has trained on it;
    its program may be a `Recording`. Any other method trains on mini-batches by itself, and serial
    corrections of whole windows in between are optional.
    """

    name: ClassVar[str]
    program: ClassVar[type[Program]]
    """The class of its programs; `program_of` sets it."""
    steps_alike: ClassVar[bool] = True
    """Whether all blocks take equally many steps, which tied weights need."""
    exact: ClassVar[bool] = False
    """Whether its steps are on the exact gradient, so that a correction can add nothing."""
    alternates: ClassVar[bool] = False
    """Whether it sweeps over windows, in turns with a serial correction."""
    sweeps: ClassVar[int] = 1
    """Default number of sweeps over a window."""
    cuts_inside: ClassVar[bool] = False
    """Whether blocks are cut inside units, too, where several tensors cross."""
    takes_local_work: ClassVar[bool] = False
    """Whether it has a pipeline that is never flushed, whose ranks can take local steps where they
    would wait."""
    has_auxiliary_weights: ClassVar[bool] = False
    """Whether it trains weights beside the network's."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """"images", "labels": what blocks that are neither first nor last need of a batch."""

    needs: ClassVar[tuple[Needs, ...]] = ()
    """What must hold in a run, whatever the settings are."""
    acts: ClassVar[Mapping[str, Acts]] = {}
    """Conditions of inherited settings, see `hybrid.solvers.acting`."""

    def check(self, setup: Setup) -> None:
        """Raise ValueError, with the remedy, for a setting that cannot work in this run."""

    @property
    def records(self) -> bool:
        """Whether its program starts from the records of an exact pass."""
        return issubclass(self.program, Recording)

    @property
    def replays(self) -> bool:
        """Whether blocks go forward once more before they go backward, but for the last."""
        return False

    @property
    def separate_momentum(self) -> bool:
        """Whether its local steps have a separate momentum, not that of the exact steps."""
        return getattr(self, "momentum", None) is not None

    @property
    def repeatable(self) -> bool:
        """Whether the same run gives the same bits."""
        return True

    @property
    def reports_losses(self) -> bool:
        """Whether the last block reports every sample's loss, in the order of the mini-batches."""
        return self.repeatable

    def num_micro_batches(self, size: int, count: int) -> int:
        """Micro-batches per mini-batch of `size` samples on `count` blocks."""
        return 1

    def micro_batch(self, size: int, count: int) -> int:
        """Samples of the first, and largest, micro-batch of a mini-batch of `size`."""
        return ceil(size / self.num_micro_batches(size, count))

    def delay(self, index: int, count: int) -> int:
        """Micro-batches by which the gradients of block `index` of `count` are late."""
        return 0

    def steps_late(self, index: int, count: int, size: int) -> float:
        """tau, the delay of a whole block's gradients in steps on mini-batches of `size`."""
        return self.delay(index, count) / self.num_micro_batches(size, count)

    def progress(self, count: int, size: int, optimizer: str = "sgd") -> float | None:
        """Progress of a step on `size` samples over an exact step's; None: it is unknown."""
        return None

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        """Most memory that block `index` of `count` holds for the backward passes of its steps.

        `lam` is a mini-batch at its input; `graph` gives what autograd keeps of a pass over it.
        """
        return graph(module, lam)

    def memory(self, setup: Setup, index: int) -> int:
        """Bytes of the auxiliary variables that block `index` stores."""
        return 0

    def layout(self) -> list[object]:
        """The settings that decide the shapes of its auxiliary variables."""
        return []

    def start(self, block: Block, links: Links, setup: Setup) -> Program:
        """Start the program of this rank."""
        return self.program(self, block, links, setup)


def program_of(solver: type[Solver]) -> Callable[[type[P]], type[P]]:
    """Make a class the program of a method."""

    def register(program: type[P]) -> type[P]:
        solver.program = program
        return program

    return register


def values_of(shape: Shape | None) -> int:
    """Numbers in one sample; 0 where there is no cut."""
    return 0 if shape is None else prod(shape)
