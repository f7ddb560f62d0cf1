"""A chain of blocks as nodes: which rank does what next, and what its neighbors send meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hybrid.solvers.base import Links
from hybrid.solvers.state import Tensors, entries
from hybrid_messages.executor import Executor
from hybrid_messages.node import Letter, Message

FORWARD, BACKWARD = 1, 2
"""Ticks of a unit's pass."""


def limit(index: int, count: int, most: int) -> int:
    """Instances that block `index` of `count` may have under way, of `most` in all.

    More would only wait in front of the next block. The last block has one at a time.
    """
    return min(most, max(most, count) - index) if index < count - 1 else 1


def draw_path(
    seed: int, step: int, first: int, survivals: Sequence[Sequence[float]]
) -> list[list[int]]:
    """The units of each block that an instance goes through, by the id of its first sample.

    `survivals`: for each block, the probabilities with which an instance goes through its units.
    What is drawn for a unit does not depend on the cuts: only units that may be left out count.
    """
    skippable = sum(p < 1 for block in survivals for p in block)
    words = np.random.SeedSequence((seed, step, first)).generate_state(2 + skippable, np.uint64)
    # 53 bits each, as floats have
    draw = iter(((words[2:] >> np.uint64(11)) * 2.0**-53).tolist())
    return [[u for u, p in enumerate(block) if p >= 1 or next(draw) < p] for block in survivals]


class Item(NamedTuple):
    """The state of an instance's message in a chain."""

    instance: int
    """Its number since the last drain."""


class Chain(Executor):
    r"""All ranks' passes over their blocks, in an order that every rank finds out by itself.

    A message takes no time, a unit's forward pass one tick and its backward pass two; the loss
    takes none. With K = 3 blocks of one unit and max_active_keys = 3, where the path of instance 2
    leaves out the unit of block 1:

        tick      0    1    2    3    4    5    6    7    8    9    10   11
        block 0   F0   F1   F2                       B0---B0   F3   B1---B1
        block 1        F0   F1             B0---B0        B1---B1   F3
        block 2             F0   B0---B0   F1   B1---B1   F2   B2---B2   F3

    `work` is told of every pass as it begins (block, forward?, instance); a rank does its own.
    Instances become known in pieces, which do not change the order.
    """

    def __init__(self, count: int, most: int, work: Callable[[int, bool, int], None]) -> None:
        super().__init__([limit(index, count, most) for index in range(count)], most)
        self.work = work
        self.lengths: list[list[int]] = []
        """Of each instance, the number of its units in each block."""
        self._admitted = 0

    def extend(self, lengths: Iterable[list[int]]) -> None:
        """All passes until the first rank would need the instance after these."""
        self.lengths += lengths
        self._run(closing=False)

    def drain(self) -> None:
        """All passes until none is under way."""
        self._run()

    def _next_instance(self) -> Sequence[Letter]:
        if self._admitted == len(self.lengths):
            return ()
        self._admitted += 1
        item = Item(self._admitted - 1)
        return [Letter(0, True, Message(0, item, self.lengths[item.instance]))]

    def _handle(
        self, node: int, forward: bool, messages: Sequence[Message]
    ) -> tuple[int, Sequence[Letter]]:
        (message,) = messages
        self.work(node, forward, message.state.instance)
        ticks = (FORWARD if forward else BACKWARD) * message.payload[node]
        if forward and node + 1 < len(self.limits):
            return ticks, [Letter(node + 1, True, message)]
        if forward:
            return ticks, [Letter(node, False, message)]
        return ticks, [Letter(node - 1, False, message)] if node else []


class Mailbox:
    """Messages of one neighbor, which arrive in its order and are needed in this rank's."""

    def __init__(self, links: Links, above: bool, tensors: int) -> None:
        self._receive_tensor = links.from_next if above else links.from_previous
        self._name = f"early {'above' if above else 'below'} "
        self._tensors = tensors
        self._coming: deque[int] = deque()
        self._early: dict[int, tuple[Tensor, ...]] = {}

    def expect(self, item: int) -> None:
        """The instance whose message comes next."""
        self._coming.append(item)

    def message(self, item: int) -> Callable[[], Tensor]:
        """Gives the tensors of an instance's message, one at each call."""
        while item not in self._early:
            self._receive()
        return partial(next, iter(self._early.pop(item)))

    def state(self) -> Tensors:
        """For a checkpoint: all messages on their way, which are received first."""
        while self._coming:
            self._receive()
        return {
            f"{self._name}{item:09d} {j}": part
            for item, parts in self._early.items()
            for j, part in enumerate(parts)
        }

    def load_state(self, found: Tensors) -> None:
        """Take back what `state` gave."""
        for name, tensor in entries(found, self._name).items():
            item = int(name.partition(" ")[0])
            self._early[item] = (*self._early.get(item, ()), tensor)

    def _receive(self) -> None:
        tensors = tuple(self._receive_tensor() for _ in range(self._tensors))
        self._early[self._coming.popleft()] = tensors
