"""The base of all nodes: messages, the states that name them, and what a node keeps of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

Item = TypeVar("Item")


class State(Protocol):
    """Names a message among those of its node and direction: hashable and immutable.

    A NamedTuple or a frozen dataclass with the field `instance` and whatever control nodes need:
    a place in a tree, a turn of a loop.
    """

    @property
    def instance(self) -> int:
        """The training sample that it belongs to."""

    def __hash__(self) -> int: ...


class Message(NamedTuple):
    """What travels on an edge: an output forward, or its gradient, of the same shape, backward."""

    port: int
    """Of the node that receives it: an input when it goes forward, an output backward."""
    state: State
    payload: Any
    """A tensor; in a chain, whose ranks tell each other's passes, the lengths of a path."""


class Letter(NamedTuple):
    """A message and the node that it goes to."""

    node: int
    forward: bool
    message: Message


class Updates:
    """What a node that learns has added up since its last step, and how late that was."""

    def __init__(self, every: int) -> None:
        self.every = every
        """Contributions to a step: min_update_frequency."""
        self.contributions = self.samples = self.count = 0
        """Of the next step, its samples; steps so far."""
        self.rate = 0.0
        """Learning rate of the newest contribution."""
        self.staleness: Counter[int] = Counter()
        """Contributions by the steps between their forward and their backward pass."""

    def add(self, before: int, samples: int = 1, rate: float = 0.0) -> bool:
        """Count gradients; whether it is time for a step. `before`: `count` in the forward pass."""
        self.staleness[self.count - before] += 1
        self.contributions += 1
        self.samples += samples
        self.rate = rate
        return self.contributions >= self.every

    def stepped(self) -> None:
        """Begin anew after a step."""
        self.contributions = self.samples = 0
        self.count += 1

    def numbers(self) -> list[float]:
        """For a checkpoint."""
        return [self.contributions, self.samples, self.rate]

    def set_numbers(self, numbers: Sequence[float]) -> None:
        """Take back what `numbers` gave; steps are counted from here."""
        contributions, samples, self.rate = numbers
        self.contributions, self.samples = int(contributions), int(samples)


class Cache(Generic[Item]):
    """What a node keeps between a forward message and its backward message, by state."""

    def __init__(self) -> None:
        self._items: dict[int, dict[State, Item]] = {}

    def put(self, state: State, item: Item) -> None:
        """ValueError if the state names an item already."""
        of_instance = self._items.setdefault(state.instance, {})
        if state in of_instance:
            raise ValueError(
                "a message of this state is here already; a state names one message at a time,"
                " so let it change from turn to turn"
            )
        of_instance[state] = item

    def pop(self, state: State) -> Item:
        """Take the item out; ValueError without one."""
        of_instance = self._items.get(state.instance, {})
        if state not in of_instance:
            raise ValueError("no forward message of this state is waiting for its gradient here")
        item = of_instance.pop(state)
        if not of_instance:
            del self._items[state.instance]
        return item

    def states(self, instance: int) -> list[State]:
        """The states of an instance that have an item."""
        return list(self._items.get(instance, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()


class Waiting(Cache["list[Tensor | None]"]):
    """Parts of one whole, in the order of their places, until the last is there."""

    def add(self, whole: State, place: int, part: Tensor, places: int) -> list[Tensor] | None:
        """All parts, once none is missing; ValueError if the place is taken."""
        parts = self._items.get(whole.instance, {}).get(whole)
        if parts is None:
            parts = [None for _ in range(places)]
            self.put(whole, parts)
        if parts[place] is not None:
            raise ValueError(f"part {place} of {places} has come twice")
        parts[place] = part
        if any(each is None for each in parts):
            return None
        return [each for each in self.pop(whole) if each is not None]


class Node(ABC):
    """Numbered inputs and outputs, each joined to one of another node by an edge of the graph.

    A forward message comes to an input and causes messages from outputs, at once or when others
    have come. Their gradients come back to those outputs and cause one to the input. Only the node
    itself touches what it keeps, so it needs no lock.
    """

    inputs: int = 1
    outputs: int = 1

    @abstractmethod
    def forward(self, message: Message, learn: bool) -> Sequence[Message]:
        """Messages by output. Without `learn` no gradient will come: keep nothing for it."""

    @abstractmethod
    def backward(self, message: Message) -> Sequence[Message]:
        """Gradients by input; the message's port is the output that its gradient came to."""

    def caches(self) -> Sequence[Cache[Any]]:
        """All that it keeps, so that a run can check that nothing is left."""
        return [value for value in vars(self).values() if isinstance(value, Cache)]

    def waiting_states(self, instance: int) -> list[State]:
        """The states of an instance of which it keeps something."""
        return [state for cache in self.caches() for state in cache.states(instance)]

    def clear(self) -> None:
        """Forget what a run that failed has left."""
        for cache in self.caches():
            cache.clear()
