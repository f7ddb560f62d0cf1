"""Nodes that wait for several messages, forward or backward, and make one of them.

The order of arrival does not matter: sums and wholes follow the order of ports or members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from hybrid_messages.node import Message, Node, State, Waiting


class Bcast(Node):
    """The same message from all outputs; backward the sum of the gradients, in their order."""

    def __init__(self, ways: int = 2) -> None:
        self.outputs = ways
        self._waiting = Waiting()

    def forward(self, message: Message, learn: bool) -> list[Message]:
        return [message._replace(port=way) for way in range(self.outputs)]

    def backward(self, message: Message) -> list[Message]:
        port, state, payload = message
        parts = self._waiting.add(state, port, payload, self.outputs)
        return [] if parts is None else [Message(0, state, reduce(add, parts))]


class Sum(Node):
    """The sum of one message from every input, in their order; backward the same gradient to all.

    All have the state and the shape of each other.
    """

    def __init__(self, ways: int = 2) -> None:
        self.inputs = ways
        self._waiting = Waiting()

    def forward(self, message: Message, learn: bool) -> list[Message]:
        port, state, payload = message
        parts = self._waiting.add(state, port, payload, self.inputs)
        if parts is None:
            return []
        _check_equal(parts)
        return [Message(0, state, reduce(add, parts))]

    def backward(self, message: Message) -> list[Message]:
        return [message._replace(port=way) for way in range(self.inputs)]


class Group(Node):
    """Waits for the messages of several states and joins them into one, of a state of its own.

    `whole` gives the state of the joined message, `members` the states that it is made of, in the
    order of its new first dimension; all have one instance and one shape.
    """

    def __init__(
        self, whole: Callable[[Any], State], members: Callable[[Any], Sequence[State]]
    ) -> None:
        self.whole, self.members = whole, members
        self._waiting = Waiting()

    def forward(self, message: Message, learn: bool) -> list[Message]:
        whole = self.whole(message.state)
        members = self.members(whole)
        if message.state not in members:
            raise ValueError(f"it belongs to {whole}, whose members are {list(members)}")
        place = members.index(message.state)
        parts = self._waiting.add(whole, place, message.payload, len(members))
        if parts is None:
            return []
        _check_equal(parts)
        return [Message(0, whole, torch.stack(parts))]

    def backward(self, message: Message) -> list[Message]:
        rows = zip(self.members(message.state), message.payload, strict=True)
        return [Message(0, member, row) for member, row in rows]


def _check_equal(parts: Sequence[Tensor]) -> None:
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"the messages to join have shapes {shapes}; they must be equal")
