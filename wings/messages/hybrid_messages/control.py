"""Nodes that route messages, wait for several and join them, and the loss, where they turn around.

The order of arrival does not matter: sums and wholes follow the order of ports or members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import isfinite
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_messages.node import Cache, Message, Node, State, Waiting


class Source(Node):
    """Where instances enter the graph; their gradients end here."""

    inputs = 0

    def forward(self, message: Message, learn: bool) -> list[Message]:
        return [Message(0, message.state, message.payload)]

    def backward(self, message: Message) -> list[Message]:
        return []


class Cond(Node):
    """Branches: a message leaves by the output that a function of its state chooses.

    Backward it joins, and needs no memory: a gradient goes the one way back.
    """

    def __init__(self, choose: Callable[[Any], int], ways: int = 2) -> None:
        self.choose, self.outputs = choose, ways

    def forward(self, message: Message, learn: bool) -> list[Message]:
        way = int(self.choose(message.state))
        if not 0 <= way < self.outputs:
            raise ValueError(f"the chosen way is {way}; there are 0 to {self.outputs - 1}")
        return [Message(way, message.state, message.payload)]

    def backward(self, message: Message) -> list[Message]:
        return [Message(0, message.state, message.payload)]


class Phi(Node):
    """Joins branches, and remembers where each message came from: backward it branches."""

    def __init__(self, ways: int = 2) -> None:
        self.inputs = ways
        self._came: Cache[int] = Cache()

    def forward(self, message: Message, learn: bool) -> list[Message]:
        if learn:
            self._came.put(message.state, message.port)
        return [Message(0, message.state, message.payload)]

    def backward(self, message: Message) -> list[Message]:
        return [Message(self._came.pop(message.state), message.state, message.payload)]


class Loop(Node):
    """Runs an instance through a body until a function of its state says stop, maybe at once.

        input 0: enter        output 0: to the body
        input 1: a turn done  output 1: leave

    `step` gives the state of the next turn, another one each time. Backward the gradient takes
    the turns in the opposite order, as each is remembered by the state that it had.
    """

    inputs = 2
    outputs = 2

    def __init__(self, until: Callable[[Any], bool], step: Callable[[Any], State]) -> None:
        self.until, self.step = until, step
        self._turns: Cache[tuple[int, State]] = Cache()
        self._left: Cache[int] = Cache()

    def forward(self, message: Message, learn: bool) -> list[Message]:
        port, state, payload = message
        if self.until(state):
            if learn:
                self._left.put(state, port)
            return [Message(1, state, payload)]
        following = self.step(state)
        if following == state:
            raise ValueError("`step` has given the same state again: count the turns in it")
        if learn:
            self._turns.put(following, (port, state))
        return [Message(0, following, payload)]

    def backward(self, message: Message) -> list[Message]:
        if message.port == 1:
            return [Message(self._left.pop(message.state), message.state, message.payload)]
        port, state = self._turns.pop(message.state)
        return [Message(port, state, message.payload)]


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


class Outcome(NamedTuple):
    """Of a message that has come to a loss."""

    state: State
    loss: float
    output: Tensor


class Loss(Node):
    """The end of the way up: loss(x, target(state)), a number; its gradient goes back down.

    A network may have several, and an instance may come to several or many times to one: the
    gradient is then that of the sum.
    """

    outputs = 0

    def __init__(
        self, loss: Callable[[Tensor, Tensor], Tensor], target: Callable[[Any], Tensor]
    ) -> None:
        self.loss, self.target = loss, target
        self.outcomes: list[Outcome] = []

    def forward(self, message: Message, learn: bool) -> list[Message]:
        _, state, payload = message
        x = payload.detach().requires_grad_(learn)
        with torch.set_grad_enabled(learn):
            loss = self.loss(x, self.target(state))
        value = float(loss.detach())
        if not isfinite(value):
            raise ValueError(f"the loss is {value}; a lower learning rate may keep it finite")
        self.outcomes.append(Outcome(state, value, payload))
        if not learn:
            return []
        (gradient,) = torch.autograd.grad(loss, [x])
        return [Message(0, state, gradient)]

    def backward(self, message: Message) -> list[Message]:
        raise ValueError("nothing lies above a loss")

    def clear(self) -> None:
        super().clear()
        self.outcomes = []


def _check_equal(parts: Sequence[Tensor]) -> None:
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"the messages to join have shapes {shapes}; they must be equal")
