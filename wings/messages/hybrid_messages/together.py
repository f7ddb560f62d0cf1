"""A layer that takes messages together that happen to wait at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybrid_messages.layer import Layer, _Met
from hybrid_messages.message import Message


class Together(Layer):
    """As `Layer`, up to `most` waiting messages a call, those of one shape stacked.

    No message waits for others to come, and nothing is padded: it is the inbox that makes the
    batch. The module sees payloads with a new first dimension and must treat its rows alone, as
    linear layers and elementwise functions do. Every backward pass runs it again, as those that
    went up together need not come back together. Sums are those of `Layer` but for their order.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        min_update_frequency: int = 1,
        most: int = 64,
    ) -> None:
        super().__init__(module, optimizer, min_update_frequency)
        if most < 1:
            raise ValueError(f"most is {most}; it must be at least 1")
        self.most: int = most

    def forward(self, message: Message, learn: bool) -> list[Message]:
        return self.forward_all([message], learn)

    def backward(self, message: Message) -> list[Message]:
        return self.backward_all([message])

    def forward_all(self, messages: Sequence[Message], learn: bool) -> list[Message]:
        sent: list[Message] = []
        for alike in _by_shape(messages, [message.payload for message in messages]):
            with torch.no_grad():
                rows = self.module(torch.stack([x for _, x in alike]))
            for ((_, state, _), x), row in zip(alike, rows, strict=True):
                if learn:
                    self._cache.put(state, _Met(x, None, self.updates))
                sent.append(Message(0, state, row))
        return sent

    def backward_all(self, messages: Sequence[Message]) -> list[Message]:
        met = [self._cache.pop(message.state) for message in messages]
        self.staleness.update(self.updates - each.updates for each in met)
        sent: list[Message] = []
        for alike in _by_shape(messages, [each.x for each in met]):
            x, y = self._run(torch.stack([x for _, x in alike]))
            dx = self._pull(x, y, torch.stack([message.payload for message, _ in alike]))
            rows = zip(alike, dx, strict=True)
            sent += [Message(0, message.state, row) for (message, _), row in rows]
        self._count(len(messages))
        return sent


def _by_shape(
    messages: Sequence[Message], inputs: Sequence[Tensor]
) -> Iterable[list[tuple[Message, Tensor]]]:
    """Messages with their inputs, those together whose inputs have one shape and type."""
    found: dict[tuple[torch.Size, torch.dtype], list[tuple[Message, Tensor]]] = {}
    for message, x in zip(messages, inputs, strict=True):
        found.setdefault((x.shape, x.dtype), []).append((message, x))
    return found.values()
