"""Messages between blocks: what packs activations that go up, and adjoints that go down."""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from hybrid.solvers.acting import Allowed
from hybrid.solvers.codecs.base import Codec
from hybrid.solvers.kernels.operations import pool, upsample, wide
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.registry import CODECS


def codec(text: str, adjoint: bool = False) -> Codec:
    """Make the codec "name" or "name:number", such as int8 or int4:32, of one direction.

    ValueError for an unknown name, TypeError or ValueError for an impossible number.
    """
    name, *numbers = text.split(":")
    made: Codec = CODECS[name](*map(int, numbers), adjoint=adjoint)
    return made


def _is_codec(text: str) -> bool:
    try:
        return isinstance(codec(text), Codec)
    except (AttributeError, TypeError, ValueError):
        return False


_NAMES = f"{', '.join(CODECS.places)}, those in groups with their size if you like, as in int4:32"
Messages = Annotated[str, Allowed(f"be one of {_NAMES}", _is_codec)]
"""A codec's name and number."""
Adjoints = Annotated[
    str, Allowed(f"be empty or one of {_NAMES}", lambda text: text == "" or _is_codec(text))
]
"""The same; empty: the codec of messages."""


def comparable(messages: str, adjoints: str, formats: bool) -> dict[str, str]:
    """The settings of a pass whose gradient is compared; `formats`: rounded, where that can be."""
    texts = {"messages": messages, "adjoints": adjoints or messages}
    plain = {name for name, text in texts.items() if not formats or codec(text).coarse}
    return {name: "float32" if name in plain else text for name, text in texts.items()}


class Wire:
    """Packs what crosses a cut and unpacks it on the other side: x up, its adjoint down.

    Sends S x (the mean over filter x filter pixels) as a codec says; the receiver gets S^+ S x.
    That map is symmetric, so adjoints that are sent the same way are the exact adjoints of the
    network with S^+ S at its cuts, up to rounding.
    """

    def __init__(self, messages: str = "float32", adjoints: str = "", filter: int = 1) -> None:
        self.up, self.down = codec(messages), codec(adjoints or messages, adjoint=True)
        self.text = messages if adjoints in ("", messages) else f"{messages}, adjoints {adjoints}"
        """What it sends, in words."""
        self.filter = filter

    def send(self, put: Callable[[Tensor], None], x: Tensor) -> None:
        """Pass the tensors of x's message to `put`."""
        self._send(self.up, put, x)

    def receive(self, get: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """x, of `dtype`, from the tensors that `get` gives."""
        return self._receive(self.up, get, dtype)

    def send_adjoint(
        self, put: Callable[[Tensor], None], p: Tensor, size: int, key: Key = ()
    ) -> None:
        """Send an adjoint of the mean over `size` samples; random numbers depend on `key` alone."""
        self._send(self.down, put, p * size if self.down.by_sample else p, key)

    def receive_adjoint(self, get: Callable[[], Tensor], dtype: torch.dtype, size: int) -> Tensor:
        """The adjoint that `send_adjoint` was given."""
        p = self._receive(self.down, get, dtype)
        return p / size if self.down.by_sample else p

    def _send(self, codec: Codec, put: Callable[[Tensor], None], x: Tensor, key: Key = ()) -> None:
        x = x if self.filter == 1 else pool(wide(x), self.filter).to(x.dtype)
        for tensor in codec.encode(x, key):
            put(tensor)

    def _receive(self, codec: Codec, get: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        message = [get() for _ in range(codec.tensors)]
        return upsample(codec.decode(message, dtype), self.filter)
