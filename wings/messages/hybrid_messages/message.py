"""Messages, the states that name them, and the shelf where a node keeps what it needs again."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

Kept = TypeVar("Kept")


class State(Protocol):
    """Names a message among those of its node and direction: hashable, never changed.

    A NamedTuple or a frozen dataclass with the field `instance` and what else control nodes ask
    for: a place in a tree, a turn of a loop.
    """

    @property
    def instance(self) -> int:
        """The training sample that it belongs to."""

    def __hash__(self) -> int: ...


class Message(NamedTuple):
    """What travels on an edge: up a node's output or down a gradient, of the same shape."""

    port: int
    """Of the node that gets it: an input going forward, an output going backward."""
    state: State
    payload: Tensor


class Shelf(Generic[Kept]):
    """What a node keeps between a forward message and its backward message, by state."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[State, Kept]] = {}

    def put(self, state: State, what: Kept) -> None:
        """ValueError where the state names something here already."""
        of_instance = self._kept.setdefault(state.instance, {})
        if state in of_instance:
            raise ValueError(
                "a message of this state is here already; a state names one message at a time,"
                " so let it change from turn to turn"
            )
        of_instance[state] = what

    def get(self, state: State) -> Kept | None:
        """What is kept, still."""
        return self._kept.get(state.instance, {}).get(state)

    def pop(self, state: State) -> Kept:
        """ValueError where there is nothing."""
        of_instance = self._kept.get(state.instance, {})
        if state not in of_instance:
            raise ValueError("no forward message of this state is waiting for its gradient here")
        what = of_instance.pop(state)
        if not of_instance:
            del self._kept[state.instance]
        return what

    def of(self, instance: int) -> list[State]:
        """The states of an instance that are kept."""
        return list(self._kept.get(instance, ()))

    def __len__(self) -> int:
        return sum(map(len, list(self._kept.values())))

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


class Waiting(Shelf["list[Tensor | None]"]):
    """Parts of one whole, in the order of their places, until the last is there."""

    def add(self, whole: State, place: int, part: Tensor, places: int) -> list[Tensor] | None:
        """All parts, once there are as many as places; ValueError where a place is taken."""
        parts = self.get(whole)
        if parts is None:
            parts = [None for _ in range(places)]
            self.put(whole, parts)
        if parts[place] is not None:
            raise ValueError(f"part {place} of {places} has come twice")
        parts[place] = part
        if any(each is None for each in parts):
            return None
        return [each for each in self.pop(whole) if each is not None]
