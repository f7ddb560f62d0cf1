"""Admission of instances and the count of what is under way; how nodes take turns is open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from hybrid_messages.control import Source
from hybrid_messages.graph import Graph, Letter
from hybrid_messages.layer import Outcome
from hybrid_messages.message import Message, State


class Entry(NamedTuple):
    """A message that enters the graph at a `Source`; an instance may bring several."""

    source: str
    state: State
    payload: Tensor


class Executor(ABC):
    """Runs instances through a graph, fewer than or as many as `max_active_keys` at a time.

    An instance is active from its first message until none of it is under way. It must then be
    forgotten by all nodes, or the run ends with a line that says which node waits for what.
    """

    def __init__(self, graph: Graph, max_active_keys: int = 1) -> None:
        if max_active_keys < 1:
            raise ValueError(f"max_active_keys is {max_active_keys}; it must be at least 1")
        self.graph, self.max_active_keys = graph, max_active_keys
        self.most_active = 0
        """Instances at a time, so far."""
        self._learn = True
        self._reset(iter(()))

    def run(self, instances: Iterable[Sequence[Entry]], learn: bool = True) -> list[Outcome]:
        """All of them, up and (with `learn`) down; then remainders of gradients are applied.

        Returns what came to the losses, in the order of `instances`. ValueError in one line for
        what a node or a user's function refuses; the graph is then empty, its weights as they are.
        """
        self._learn = learn
        self._reset(iter(instances))
        try:
            self._work()
            if learn:
                self.graph.drain()
        except BaseException:
            self.graph.clear()
            raise
        outcomes = [each for loss in self.graph.losses for each in loss.outcomes]
        for loss in self.graph.losses:
            loss.outcomes = []
        return sorted(outcomes, key=lambda each: self._order[each.state.instance])

    @abstractmethod
    def _work(self) -> None:
        """Until all inboxes are empty and no instance is left to admit."""

    def _reset(self, instances: Iterator[Sequence[Entry]]) -> None:
        self._instances = instances
        self._active: dict[int, int] = {}  # messages under way, by instance
        self._order: dict[int, int] = {}
        self._inboxes: dict[tuple[int, bool], deque[Message]] = {
            (at, forward): deque()
            for at in range(len(self.graph.nodes))
            for forward in (False, True)
        }

    def _admit(self) -> list[Letter]:
        """The first messages of as many instances as may be active."""
        letters: list[Letter] = []
        while len(self._active) < self.max_active_keys:
            entries = next(self._instances, None)
            if entries is None:
                break
            letters += self._enter(list(entries))
        self.most_active = max(self.most_active, len(self._active))
        return letters

    def _enter(self, entries: Sequence[Entry]) -> list[Letter]:
        numbers = {entry.state.instance for entry in entries}
        if len(numbers) != 1:
            raise ValueError(
                f"an instance must bring messages of its own, not of {sorted(numbers) or 'none'}"
            )
        (number,) = numbers
        if number in self._active:
            raise ValueError(f"instance {number} is under way already; number each differently")
        self._active[number] = len(entries)
        self._order.setdefault(number, len(self._order))
        letters = []
        for name, state, payload in entries:
            at = self.graph.index(name)
            if not isinstance(self.graph.nodes[at], Source):
                raise ValueError(f"instance {number} enters at {name!r}, which is no Source")
            letters.append(Letter(at, True, Message(0, state, payload)))
        return letters

    def _take(self, at: int, forward: bool) -> list[Message]:
        """What a node handles at a time."""
        inbox, most = self._inboxes[at, forward], self.graph.nodes[at].most
        return [inbox.popleft() for _ in range(min(len(inbox), most or len(inbox)))]

    def _account(self, handled: Sequence[Message], letters: Sequence[Letter]) -> None:
        """Counts what is under way; an instance of which nothing is has come home."""
        arrived = [message.state.instance for message in handled]
        if arrived == [letter.message.state.instance for letter in letters]:
            return  # a message for a message, as of most nodes
        for letter in letters:
            instance = letter.message.state.instance
            if instance not in self._active:
                raise ValueError(
                    f"node {self.graph.names[letter.node]!r} got a message of instance {instance},"
                    " which is not active: states must keep their instance"
                )
            self._active[instance] += 1
        for instance in arrived:
            self._active[instance] -= 1
        for instance in dict.fromkeys(arrived):
            if not self._active[instance]:
                del self._active[instance]
                self.graph.check_home(instance)
