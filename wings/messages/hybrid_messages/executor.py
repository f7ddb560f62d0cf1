"""Who runs nodes: admission of instances, the count of messages under way, and turns by a clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from torch import Tensor

from hybrid_messages.control import Outcome, Source
from hybrid_messages.graph import Graph
from hybrid_messages.layer import Layer
from hybrid_messages.node import Letter, Message, State


class Turn(NamedTuple):
    """What a node handles at a time."""

    end: int
    """The tick of the clock at which it sends what comes of it."""
    node: int
    forward: bool
    messages: Sequence[Message]
    letters: Sequence[Letter]


class Executor(ABC):
    r"""Runs instances through nodes, as many as `max_active_keys` at a time, by a simulated clock.

        admit an instance while fewer than max_active_keys are active: while none of it is under way
        an idle node takes a message on its way back, of the oldest instance; without any it takes
        the message on its way up that came first, unless `limits` of it are under way above it
        what a node sends arrives when its turn ends, in the order of the nodes

    Nothing depends on how fast anything is, so the result has the same bits run after run. (What
    one operation of torch returns may depend on torch.set_num_threads.)
    """

    def __init__(self, limits: Sequence[float], max_active_keys: int) -> None:
        if max_active_keys < 1:
            raise ValueError(f"max_active_keys is {max_active_keys}; it must be at least 1")
        self.limits, self.max_active_keys = limits, max_active_keys
        self.most_active = 0
        """The largest number of instances at a time so far."""
        self.ticks = 0
        """Of the clock, so far."""
        self._reset()

    def _reset(self) -> None:
        """Nothing is under way."""
        self._up = [deque[Message]() for _ in self.limits]
        self._back: list[list[tuple[int, int, Message]]] = [[] for _ in self.limits]
        self._idle = [True for _ in self.limits]
        self._above = [0 for _ in self.limits]
        """Messages that each node has sent up, and whose gradients have not passed it yet."""
        self._turns: list[Turn] = []
        self._active: dict[int, int] = {}
        """Messages under way, by instance."""
        self._order: dict[int, int] = {}
        self._number = count()

    def _run(self, closing: bool = True) -> None:
        """Until none is under way, or until the first node idles for want of the next instance."""
        self._admit()
        while True:
            for node in range(len(self.limits)):
                busy = not self._idle[node] or self._begin(node)
                if not (busy or node or closing) and len(self._active) < self.max_active_keys:
                    return
            if not self._turns:
                return
            self.ticks = self._turns[0].end
            while self._turns and self._turns[0].end == self.ticks:
                self._end(heappop(self._turns))
            self._admit()

    def _admit(self) -> None:
        while len(self._active) < self.max_active_keys and (letters := self._next_instance()):
            instance = letters[0].message.state.instance
            self._active[instance] = 0
            self._order.setdefault(instance, len(self._order))
            self._deliver(letters)
        self.most_active = max(self.most_active, len(self._active))

    def _begin(self, node: int) -> bool:
        """Let an idle node take its turn, if it has mail."""
        back, up = self._back[node], self._up[node]
        if back:
            forward, size = False, self._turn_size(node, len(back))
            messages = [heappop(back)[-1] for _ in range(size)]
        elif up and self._above[node] < self.limits[node]:
            forward, size = True, self._turn_size(node, len(up))
            messages = [up.popleft() for _ in range(size)]
            self._above[node] += size
        else:
            return False
        self._idle[node] = False
        ticks, letters = self._handle(node, forward, messages)
        heappush(self._turns, Turn(self.ticks + ticks, node, forward, messages, letters))
        return True

    def _end(self, turn: Turn) -> None:
        self._idle[turn.node] = True
        self._above[turn.node] -= 0 if turn.forward else len(turn.messages)
        self._deliver(turn.letters)
        for message in turn.messages:
            instance = message.state.instance
            self._active[instance] -= 1
            if not self._active[instance]:
                del self._active[instance]
                self._ended(instance)

    def _deliver(self, letters: Iterable[Letter]) -> None:
        for node, forward, message in letters:
            instance = message.state.instance
            self._active[instance] += 1
            if forward:
                self._up[node].append(message)
            else:
                heappush(self._back[node], (self._order[instance], next(self._number), message))

    def _turn_size(self, node: int, waiting: int) -> int:
        """How many of the waiting messages a node takes in one turn."""
        return 1

    @abstractmethod
    def _next_instance(self) -> Sequence[Letter]:
        """The first messages of the next instance; none where there is none."""

    @abstractmethod
    def _handle(
        self, node: int, forward: bool, messages: Sequence[Message]
    ) -> tuple[int, Sequence[Letter]]:
        """Do a node's turn: its ticks, and what the node then sends."""

    def _ended(self, instance: int) -> None:  # noqa: B027
        """No message of an instance is under way any more."""


class Entry(NamedTuple):
    """A message that enters the graph at a `Source`; an instance may bring several."""

    source: str
    state: State
    payload: Tensor


class Static(Executor):
    """Runs instances through a graph in which a node's turn takes a tick.

    A layer handles one message in a turn, any other node all that wait.

    An instance that has ended must be forgotten by all nodes, or the run ends with an error that
    says which node waits for what.
    """

    def __init__(self, graph: Graph, max_active_keys: int = 1) -> None:
        super().__init__([inf for _ in graph.nodes], max_active_keys)
        self.graph = graph

    def run(self, instances: Iterable[Sequence[Entry]], learn: bool = True) -> list[Outcome]:
        """Run all of them forward and, with `learn`, backward; then apply gradients that are left.

        Returns what came to the losses, in the order of `instances`. ValueError if a node or a
        user's function raises; the graph is then empty, and its weights stay as they are.
        """
        self._learn, self._instances = learn, iter(instances)
        self._reset()
        try:
            self._run()
            if learn:
                for layer in self.graph.layers.values():
                    layer.drain()
        except BaseException:
            for node in self.graph.nodes:
                node.clear()
            raise
        outcomes = [each for loss in self.graph.losses for each in loss.outcomes]
        for loss in self.graph.losses:
            loss.outcomes = []
        return sorted(outcomes, key=lambda each: self._order[each.state.instance])

    _instances: Iterator[Sequence[Entry]]

    def _next_instance(self) -> Sequence[Letter]:
        entries = next(self._instances, None)
        if entries is None:
            return ()
        numbers = {entry.state.instance for entry in entries}
        if len(numbers) != 1:
            raise ValueError(
                f"an instance must bring messages of its own, not of {sorted(numbers) or 'none'}"
            )
        (number,) = numbers
        if number in self._active:
            raise ValueError(f"instance {number} is under way already; number each differently")
        letters = []
        for name, state, payload in entries:
            at = self.graph.index(name)
            if not isinstance(self.graph.nodes[at], Source):
                raise ValueError(f"instance {number} enters at {name!r}, which is no Source")
            letters.append(Letter(at, True, Message(0, state, payload)))
        return letters

    def _turn_size(self, node: int, waiting: int) -> int:
        return 1 if isinstance(self.graph.nodes[node], Layer) else waiting

    def _handle(
        self, node: int, forward: bool, messages: Sequence[Message]
    ) -> tuple[int, Sequence[Letter]]:
        sent = [self.graph.handle(node, forward, message, self._learn) for message in messages]
        return 1, [letter for letters in sent for letter in letters]

    def _ended(self, instance: int) -> None:
        self.graph.check_forgotten(instance)
