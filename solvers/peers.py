"""Replicas of a block: the ranks that own it, how they agree on its weights, work they divide."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybrid.solvers.state import State, Stateful


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

    def sum(self, vector: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of all vectors (n,) in an order that the links choose.

        All replicas get the same bits; the vector's memory may become the sum's.
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


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of their bits, in their order."""
    checksum = 0
    for x in tensors:
        values = x.detach().cpu().contiguous().reshape(-1)
        checksum = zlib.crc32(values.view(torch.uint8).numpy().data, checksum)
    return checksum


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
        module, peers = self.block.module, self.peers
        for tensor in (*module.parameters(), *module.buffers()):
            # the copy stays as it is while it travels
            message = torch.empty(0) if peers.replica else tensor.detach().clone()
            first, *_ = peers.exchange([message] * peers.replicas)()
            if peers.replica:
                tensor.detach().copy_(first)

    def compare(self) -> None:
        """RuntimeError if the weights of the block's replicas differ in a bit after a step.

        An exact strategy calls it; it does nothing unless `COMPARED`.
        """
        self._steps += 1
        if not COMPARED:
            return
        message = torch.tensor([checksum(self.block.everything())])
        sums = torch.cat(self.peers.exchange([message] * self.peers.replicas)()).tolist()
        other = next((r for r, each in enumerate(sums) if each != sums[0]), None)
        if other is not None:
            raise RuntimeError(
                f"the weights of block {self.block.index} differ between replicas 0 and {other} "
                f"after its step {self._steps}: report it, or see what in a solver or an "
                "optimizer of your own depends on the replica"
            )

    def last_pass(self, kind: str) -> AbstractContextManager[None]:
        """Around the last backward pass before a step of `kind`: its gradients will not change."""
        return nullcontext()

    def total(self, vector: Tensor) -> Tensor:
        """The sum of a vector (n,) over the replicas whose samples share a step with this one's.

        All call it. Unless all steps are shared, a replica's steps are on its own mean loss.
        """
        return vector

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


class Tied(Stateful, Protocol):
    """How blocks keep weights equal that several of them have; see `hybrid.solvers.sync.ties`."""

    def begin(self) -> None:
        """Before the first step, on all blocks at once: agree on where each of them is."""
        ...

    def sum_gradients(self, exact: bool) -> None:
        """Before a step: gradients of what other blocks have, too, become the sums of all.

        `exact`: those of all blocks are of one mini-batch.
        """
        ...

    def counted(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Those of them that count in the norm of all gradients: each weight's once."""
        ...

    def apart(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """Those that no other block has, then those of each set of blocks that have the same."""
        ...


class Sharing:
    """Each of R replicas computes some of n tensors, and gives them to the others.

    The costliest go first, each to the replica that has the least to do, so that all replicas know
    without a message who computes what. The tensors are the same whoever computes them, and so are
    the bits. A replica sends what it has computed once to each other, 1/R of all numbers.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __call__(
        self, costs: Sequence[float], compute: Callable[[int], Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """All of `compute(i)`, which have the shapes and number formats of `like[i]`."""
        peers, owners, dtype = self.peers, self.owners(costs), torch.float32
        for each in like:
            dtype = torch.promote_types(dtype, each.dtype)
        parts = [[i for i, r in enumerate(owners) if r == s] for s in range(peers.replicas)]
        empty = torch.empty(0, dtype=dtype, device=like[0].device if like else None)
        computed = [compute(i).reshape(-1).to(dtype) for i in parts[peers.replica]]
        message = torch.cat([empty, *computed])
        tensors: dict[int, Tensor] = {}
        for part, vector in zip(parts, peers.exchange([message] * len(parts))(), strict=True):
            pieces = vector.split([like[i].numel() for i in part])
            for i, piece in zip(part, pieces, strict=True):
                tensors[i] = piece.view(like[i].shape).to(like[i].dtype)
        return [tensors[i] for i in range(len(like))]

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The replica that computes each."""
        load = [0.0] * self.peers.replicas
        owners = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = min(range(len(load)), key=load.__getitem__)
            load[owners[i]] += costs[i]
        return owners


def statistics(module: nn.Module) -> list[Tensor]:
    """Running statistics and other real buffers, in the module's order."""
    return [b for b in module.buffers() if b.is_floating_point()]
