"""Who runs a graph: admission of instances, the count of messages under way, and turns by ticks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from hybrid_messages.control import Outcome, Source
from hybrid_messages.graph import Graph, Letter
from hybrid_messages.node import Message, State


class Entry(NamedTuple):
    """A message that enters the graph at a `Source`; an instance may bring several."""

    source: str
    state: State
    payload: Tensor


class Executor(ABC):
    """Runs instances through a graph, fewer than or as many as `max_active_keys` at a time.

    An instance is active from its first message until none of it is under way. It must then be
    forgotten by all nodes, or the run ends with an error that says which node waits for what.
    """

    def __init__(self, graph: Graph, max_active_keys: int = 1) -> None:
        if max_active_keys < 1:
            raise ValueError(f"max_active_keys is {max_active_keys}; it must be at least 1")
        self.graph, self.max_active_keys = graph, max_active_keys
        self.most_active = 0
        """The largest number of instances at a time so far."""
        self._learn = True
        self._reset(iter(()))

    def run(self, instances: Iterable[Sequence[Entry]], learn: bool = True) -> list[Outcome]:
        """Run all of them forward and, with `learn`, backward; then apply gradients that are left.

        Returns what came to the losses, in the order of `instances`. ValueError if a node or a
        user's function raises; the graph is then empty, and its weights stay as they are.
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
        """Handle messages until all inboxes are empty and no instance is left."""

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
        """Messages for a node to handle together."""
        inbox, most = self._inboxes[at, forward], self.graph.nodes[at].most
        return [inbox.popleft() for _ in range(min(len(inbox), most or len(inbox)))]

    def _account(self, handled: Sequence[Message], letters: Sequence[Letter]) -> None:
        """Count messages under way; an instance without any has ended."""
        arrived = [message.state.instance for message in handled]
        if arrived == [letter.message.state.instance for letter in letters]:
            return  # one message for each, as most nodes send
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
                self.graph.check_forgotten(instance)


Mail = tuple[int, bool, list[Message]]
"""A node, a direction and messages of that direction to the node."""


class Static(Executor):
    r"""A simulation in which every node has a processor of its own and a message takes a tick.

        each tick   instances are admitted, as many as may be
                    each node that has mail takes some: backward first; one message, or `Node.most`
                    when all have done, what they send is delivered, in the order of the nodes

    Nothing depends on how fast anything is, so the result has the same bits run after run, and a
    tick's nodes may be spread over `workers` threads without changing it: no node touches what
    another keeps. (What one operation of torch returns may depend on torch.set_num_threads.)
    """

    def __init__(self, graph: Graph, max_active_keys: int = 1, workers: int = 1) -> None:
        super().__init__(graph, max_active_keys)
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self.workers = workers
        self.ticks = 0
        """Ticks so far."""

    def _work(self) -> None:
        if self.workers == 1:
            self._ticks(map)
        else:
            with ThreadPoolExecutor(self.workers) as pool:
                self._ticks(pool.map)

    def _ticks(self, spread: Callable[..., Iterable[list[Letter]]]) -> None:
        self._deliver(self._admit())
        while mail := self._mail():
            self.ticks += 1
            sent = list(spread(self._handle, mail))
            for (_, _, handled), letters in zip(mail, sent, strict=True):
                self._account(handled, letters)
                self._deliver(letters)
            self._deliver(self._admit())

    def _mail(self) -> list[Mail]:
        """What each node handles in this tick, in their order."""
        mail = []
        for at in range(len(self.graph.nodes)):
            forward = not self._inboxes[at, False]
            if self._inboxes[at, forward]:
                mail.append((at, forward, self._take(at, forward)))
        return mail

    def _handle(self, mail: Mail) -> list[Letter]:
        return self.graph.handle(*mail, self._learn)

    def _deliver(self, letters: Iterable[Letter]) -> None:
        for node, forward, message in letters:
            self._inboxes[node, forward].append(message)
