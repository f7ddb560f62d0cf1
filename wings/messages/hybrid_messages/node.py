"""The base of all nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hybrid_messages.message import Message, Shelf, State


class Node(ABC):
    """Numbered inputs and outputs, each joined to one of another node by an edge of the graph.

    A forward message comes to an input and causes messages from outputs, at once or when others
    have come; its gradient comes back to those outputs and causes a message to the input.
    Nobody else touches what a node keeps, so a node needs no lock.
    """

    inputs: int = 1
    outputs: int = 1
    most: int | None = None
    """Messages that it takes at a time; None: all that wait, for a node that computes little."""

    @abstractmethod
    def forward(self, message: Message, learn: bool) -> Sequence[Message]:
        """Messages by output. Without `learn` no gradient will come: keep nothing for it."""

    @abstractmethod
    def backward(self, message: Message) -> Sequence[Message]:
        """Gradients by input; the message's port is the output that its gradient came to."""

    def forward_all(self, messages: Sequence[Message], learn: bool) -> Sequence[Message]:
        """Several at once, in order."""
        return [sent for message in messages for sent in self.forward(message, learn)]

    def backward_all(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Several at once, in order."""
        return [sent for message in messages for sent in self.backward(message)]

    def shelves(self) -> Sequence[Shelf[Any]]:
        """What it keeps, for the counts and for the check that nothing is left."""
        return [value for value in vars(self).values() if isinstance(value, Shelf)]

    def kept(self, instance: int) -> list[State]:
        """States of an instance that something is kept of."""
        return [state for shelf in self.shelves() for state in shelf.of(instance)]

    def clear(self) -> None:
        """Forget what a run that failed has left."""
        for shelf in self.shelves():
            shelf.clear()
