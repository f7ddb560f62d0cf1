"""Replicas of a block: exchanges between them, synchronization of weights, shared work."""

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybrid.solvers.state import State, Stateful, digests


class Sum(NamedTuple):
    """A sum over replicas that has begun; `finish` waits for it."""

    finish: Callable[[], Tensor]
    ready: Callable[[], bool] | None = None
    """Whether it has arrived, which replicas may hear at different steps; None: cannot be asked."""


class Peers(Protocol):
    """The ranks that own the same block, one in each replica.

    All peers begin the same exchanges in the same order, and may finish them in any order. Neither
    side may write to an exchanged tensor afterwards.
    """

    replica: int
    replicas: int

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Send `pieces[r]` to replica r; calling the result waits for all pieces, by replica.

        `expected[r]` has the format of replica r's piece, if that is known.
        """
        ...

    def sum(self, vector: Tensor) -> Sum:
        """Begin the sum of all vectors (n,), in an order that the links choose.

        All replicas get the same bits. The sum may reuse the vector's memory.
        """
        ...


class Replica(Protocol):
    """The part of a block that a strategy uses: weights, gradients, optimizers."""

    module: nn.Module
    index: int
    count: int
    optimizers: dict[str, torch.optim.Optimizer]
    companions: dict[str, torch.optim.Optimizer]

    def stepping(self, kind: str) -> list[nn.Parameter]:
        """List the parameters of steps of `kind`, in the same order on every replica."""
        ...

    def everything(self) -> list[nn.Parameter]:
        """List the parameters of steps of any kind, likewise."""
        ...


COMPARED = bool(os.environ.get("HYBRID_DEBUG"))
"""Whether replicas compare the bits of their weights after every step (HYBRID_DEBUG=1).

It costs a small message to every replica.
"""


def checksum(tensors: Iterable[Tensor]) -> int:
    """Compute the CRC-32 of tensors' bits, in order."""
    checksum = 0
    for x in tensors:
        values = x.detach().cpu().contiguous().reshape(-1)
        checksum = zlib.crc32(values.view(torch.uint8).numpy().data, checksum)
    return checksum


class Sync(ABC):
    """Synchronizes one block's weights with its other replicas, and holds a strategy's state.

    A replica's gradients are its term of the mini-batch's mean: sums over its samples divided by
    the size of the whole mini-batch. `share` is the replica's fraction of the mini-batch.
    """

    def __init__(self, strategy: Any, block: Replica, peers: Peers, share: float) -> None:
        self.strategy, self.block, self.peers, self.share = strategy, block, peers, share
        self._steps = 0
        self.begin()

    def begin(self) -> None:  # noqa: B027
        """Create the strategy's state on this rank."""

    def copy_first_replica(self) -> None:
        """Copy the weights and buffers of the first replica to all others.

        A script that does not seed torch builds a different network on each rank. Frozen weights
        are copied only where any replica has others.
        """
        module, peers = self.block.module, self.peers
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        if frozen := [p for p in module.parameters() if not p.requires_grad]:
            everyone = torch.stack(peers.exchange([digests(frozen)] * peers.replicas)())
            equal = (everyone == everyone[0]).all(2).all(0).tolist()
            alike = {id(p) for p, same in zip(frozen, equal, strict=True) if same}
            tensors = [tensor for tensor in tensors if id(tensor) not in alike]
        for tensor in tensors:
            # a copy, because training may change the tensor before the message has left
            message = torch.empty(0) if peers.replica else tensor.detach().clone()
            first, *_ = peers.exchange([message] * peers.replicas)()
            if peers.replica:
                tensor.detach().copy_(first)

    def compare(self) -> None:
        """Raise RuntimeError if the weights of replicas differ in a bit after a step.

        Exact strategies call it; it does nothing unless `COMPARED`.
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
        """Wrap the last backward pass before a step of `kind`: sums may begin during it."""
        return nullcontext()

    def begin_sum(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
        """Take the gradients of some weights, and begin their sum for a step on those alone.

        Calling the result waits for the sum and leaves it in their place, where the next step finds
        it. Methods that step unit by unit reject a strategy without it.
        """
        raise NotImplementedError

    def total(self, vector: Tensor) -> Tensor:
        """Sum a vector (n,) over the replicas whose samples share a step with this one's.

        All replicas call it. Unless all steps are shared, a replica steps on its own mean loss.
        """
        return vector

    @abstractmethod
    def before_step(self, kind: str, rate: float) -> bool:
        """Synchronize the gradients of a step of `kind`, if the strategy does.

        Returns whether the optimizer shall step on the gradients.
        """

    def after_step(self, kind: str) -> None:  # noqa: B027
        """Follow up on a step, whether or not the optimizer took it."""

    def join(self) -> None:  # noqa: B027
        """Make weights and running statistics of all replicas equal, at the end of a training.

        Code that replaces a weight's values outside a step must give the parameter new memory:
        graphs under way may still need the old values in place.
        """

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Make weights and running statistics equal within an evaluation or a checkpoint.

        A strategy whose replicas differ between rounds restores their own values afterwards.
        """
        self.join()
        yield

    def state(self) -> State:
        """Return the state under way on this replica, for a checkpoint."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Restore the state that `state` gave."""


class Tied(Stateful, Protocol):
    """Keeps weights equal that several blocks share; see `hybrid.solvers.sync.ties`."""

    def begin(self) -> None:
        """Exchange step counts before the first step; all blocks call it together."""
        ...

    def sum_gradients(self, exact: bool) -> None:
        """Replace gradients of tied weights by the sums over blocks, before a step.

        `exact`: the gradients of all blocks are of one mini-batch.
        """
        ...

    def without_copies(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Leave out gradients of weights that an earlier block counts in the network's norm."""
        ...

    def by_blocks(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """Divide gradients by the blocks that have the weight, this block's alone first."""
        ...


class Sharing:
    """Divides the computation of n tensors among R replicas, which exchange the results.

    The costliest tensors are assigned first, each to the replica with the least work, so all
    replicas know the assignment without a message. The bits do not depend on which replica
    computes a tensor. A replica sends its results, about 1/R of all numbers, to every other.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __call__(
        self, costs: Sequence[float], compute: Callable[[int], Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return `compute(i)` for all i, each of the shape and number format of `like[i]`."""
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
        """Assign each tensor to a replica."""
        load = [0.0] * self.peers.replicas
        owners = [0] * len(costs)
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = min(range(len(load)), key=load.__getitem__)
            load[owners[i]] += costs[i]
        return owners


def statistics(module: nn.Module) -> list[Tensor]:
    """List running statistics and other real buffers, in the module's order."""
    return [b for b in module.buffers() if b.is_floating_point()]
