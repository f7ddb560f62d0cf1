"""What a strategy is by which replicas of a block keep its weights together."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import REPLICAS, Acts, Needs, Settings
from hybrid.solvers.state import State
from hybrid.solvers.sync.registry import STRATEGIES


class Peers(Protocol):
    """The ranks that own the same block, one a replica.

    All of them begin the same exchanges in the same order, and may end them in any. A tensor
    handed over must not be written to afterwards, by either side.
    """

    replica: int
    replicas: int

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Send `pieces[r]` to replica r; the call of what it gives waits for theirs, in order.

        `expected[r]` has the format of what replica r sends, if that is known.
        """
        ...

    def sum(self, vector: Tensor) -> Callable[[], Tensor] | None:
        """Begin the sum of all vectors (n,) in an order that the links' engine chooses.

        All replicas get the same bits; the vector's memory may become the sum's. None where there
        is no engine.
        """
        ...


class Replica(Protocol):
    """What a strategy sees of a block: its weights, their gradients, who steps them."""

    module: nn.Module
    index: int
    count: int
    optimizers: dict[str, torch.optim.Optimizer]
    companions: dict[str, torch.optim.Optimizer]

    def stepping(self, kind: str) -> list[nn.Parameter]:
        """What steps of `kind` move, in an order that is the same on every replica."""
        ...

    def everything(self) -> list[nn.Parameter]:
        """What steps of any kind move, likewise."""
        ...


COMPARED = bool(os.environ.get("HYBRID_DEBUG"))
"""Whether replicas compare the bits of their weights after every step: HYBRID_DEBUG=1 asks for it.

It costs a small message to every replica.
"""


class Sync(ABC):
    """Keeps the weights of one block's replicas together: all that a strategy keeps on a rank.

    A replica's gradients are its part of the mini-batch's mean: sums over its samples divided by
    the size of the whole mini-batch, of which it has the `share`.
    """

    def __init__(self, strategy: Any, block: Replica, peers: Peers, share: float) -> None:
        self.strategy, self.block, self.peers, self.share = strategy, block, peers, share
        self._steps = 0
        self.begin()

    def begin(self) -> None:  # noqa: B027
        """Make what this rank keeps."""

    def start_alike(self) -> None:
        """Give all replicas the weights and buffers of the first.

        A script that does not seed torch builds another network on each rank.
        """
        module = self.block.module
        for held in (*module.parameters(), *module.buffers()):
            own = held.detach()
            # the copy stays as it is while it travels
            mine = torch.empty(0) if self.peers.replica else own.clone()
            first, *_ = self.peers.exchange([mine] * self.peers.replicas)()
            if self.peers.replica:
                own.copy_(first)

    def compare(self) -> None:
        """RuntimeError if the weights of the block's replicas differ in a bit after a step.

        An exact strategy calls it; it does nothing unless `COMPARED`.
        """
        self._steps += 1
        if not COMPARED:
            return
        number = 0
        for p in self.block.everything():
            held = p.detach().cpu().contiguous().reshape(-1)
            number = zlib.crc32(held.view(torch.uint8).numpy().data, number)
        mine = torch.tensor([number])
        found = torch.cat(self.peers.exchange([mine] * self.peers.replicas)()).tolist()
        other = next((r for r, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise RuntimeError(
                f"the weights of block {self.block.index} differ between replicas 0 and {other} "
                f"after its step {self._steps}: report it, or see what in a solver or an "
                "optimizer of your own depends on the replica"
            )

    def last_pass(self, kind: str) -> AbstractContextManager[None]:
        """Around the last backward pass before a step of `kind`: its gradients will not change."""
        return nullcontext()

    def total(self, own: Tensor) -> Tensor:
        """The sum of a vector (n,) over the replicas whose samples share a step with this one's.

        All call it. Unless all steps are shared, a replica's steps are on its own mean loss.
        """
        return own

    @abstractmethod
    def before_step(self, kind: str, rate: float) -> bool:
        """The gradients of a step of `kind` are at hand: agree on them, or leave them alone.

        Gives whether the optimizer shall step on what is then there.
        """

    def after_step(self, kind: str) -> None:  # noqa: B027
        """The step is over, whether or not the optimizer had a part in it."""

    def join(self) -> None:  # noqa: B027
        """Make weights and running statistics of all replicas equal: the training has ended.

        Whoever replaces a weight's values outside of a step gives the parameter memory of its own:
        what is under way may still need the old ones, where they were.
        """

    def release(self) -> None:  # noqa: B027
        """Remove from the module what was added to it."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within it weights and running statistics are equal, for an evaluation or a checkpoint.

        A strategy whose replicas differ between rounds gives them back their own afterwards.
        """
        self.join()
        yield

    def state(self) -> State:
        """For a checkpoint: what is under way on this replica."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Take back what `state` gave."""


EXACT_MESSAGES = Acts(
    "sync.messages is float32, because sums of rounded numbers are in the order of the replicas",
    lambda run: getattr(run.sync, "messages", "float32") == "float32",
)
ANOTHER = "choose another solver or sync.name=all-reduce"


@dataclass(frozen=True, kw_only=True)
class Strategy(Settings, ABC):
    """A way to keep replicas together: a frozen dataclass of its settings."""

    order: Annotated[Literal["auto", "replicas", "engine"], EXACT_MESSAGES] = "auto"
    """Order of sums: that of the replicas, or the engine's own; auto: the engine's beyond 8."""

    name: ClassVar[str]
    program: ClassVar[type[Sync]]
    """What a rank runs."""
    exact: ClassVar[bool] = False
    """Whether all replicas have the same weights after every step."""
    anchored: ClassVar[bool] = False
    """Whether it keeps a copy of each weight of the network."""
    plain: ClassVar[bool] = False
    """Whether all steps must be of one kind."""
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            REPLICAS.where,
            lambda run: run.replicas > 1 or run.sync.name == STRATEGIES.default,
            REPLICAS.remedy,
        ),
        Needs(
            "the solver trains no other weights beside the network's, of which it keeps a copy",
            lambda run: not run.sync.anchored or not run.solver.has_auxiliary_weights,
            ANOTHER,
        ),
        Needs(
            "solver.clip_norm is 0, because it steps on sums of the gradients of several steps",
            lambda run: not run.sync.plain or not getattr(run.solver, "clip_norm", 0.0),
            "leave solver.clip_norm out, or choose sync.name=all-reduce",
        ),
        Needs(
            "all steps are of one kind, because it adds up their gradients, so that there are no "
            "corrections and no serial epochs beside a solver's own steps",
            lambda run: (
                not run.sync.plain
                or run.solver.exact
                or not (run.solver.alternates or run.setup.corrects)
            ),
            f"leave rounds.serial_epochs out, or {ANOTHER}",
        ),
    )
    """What must hold in a run with it."""
    acts: ClassVar[Mapping[str, Acts]] = {"sync.*": REPLICAS}
    """Conditions of inherited settings, see `hybrid.solvers.acting`."""

    def copies(self, replicas: int) -> float:
        """Numbers that a rank keeps for each of its weights, from one step to the next."""
        return 0.0

    def start(self, block: Replica, peers: Peers, share: float) -> Sync:
        """This rank's part; `share` is what its replica has of every mini-batch."""
        return self.program(self, block, peers, share)


def statistics(module: nn.Module) -> list[Tensor]:
    """Running statistics and other real buffers, in the module's order."""
    return [b for b in module.buffers() if b.is_floating_point()]
