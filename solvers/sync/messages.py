"""Numbers on their way between replicas: formats, and what their rounding leaves for later."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MessageFormat = Literal["float32", "bfloat16", "int8"]


def encode(x: Tensor, kind: MessageFormat) -> Tensor:
    """A vector (n,) as it travels; float32 sends it as it is.

    int8 is round(x / s) behind the four bytes of s = max |x| / 127, in one vector of bytes.
    """
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return x.to(torch.bfloat16)
    scale = (x.abs().max() / 127 if x.numel() else x.new_zeros(())).float()
    # of zeros alone every scale will do
    rounded = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return torch.cat([scale.reshape(1).view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)])


def decode(message: Tensor, kind: MessageFormat, dtype: torch.dtype) -> Tensor:
    """What `encode` was given, as far as the format holds it."""
    if kind != "int8":
        return message.to(dtype)
    scale = message[:4].clone().view(torch.float32)
    return message[4:].view(torch.int8).to(dtype) * scale.to(dtype)


def bytes_per_number(kind: MessageFormat) -> int:
    """Of a long message."""
    return {"float32": 4, "bfloat16": 2, "int8": 1}[kind]


class Feedback:
    """What rounding has left out of a vector, added to the next one (error feedback).

        message = Q(x + e),   e <- x + e - Q(x + e)

    (Karimireddy et al., arXiv 1901.09847.) Nothing is kept where the format is exact.
    """

    def __init__(self, kind: MessageFormat) -> None:
        self.kind = kind
        self.left: Tensor | None = None

    def send(self, x: Tensor) -> Tensor:
        """x as it travels."""
        if self.kind == "float32":
            return x
        x = x if self.left is None else x + self.left
        message = encode(x, self.kind)
        self.left = x - decode(message, self.kind, x.dtype)
        return message
