"""Messages between blocks: what packs activations that go up, and adjoints that go down."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from hybrid.solvers.acting import Allowed
from hybrid.solvers.codecs.base import Codec
from hybrid.solvers.layers.bundle import Bundle, Crossing, each
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.registry import CODECS

Dtypes = torch.dtype | tuple[torch.dtype, ...]


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

    Where several tensors cross, each large one is sent by the codec, the small ones as they are.
    """

    def __init__(self, messages: str = "float32", adjoints: str = "") -> None:
        self.up, self.down = codec(messages), codec(adjoints or messages, adjoint=True)
        self.text = messages if adjoints in ("", messages) else f"{messages} / {adjoints}"
        """The codecs of both directions."""

    def sample_bytes(self, shape: Sequence[int]) -> tuple[float, float]:
        """Bytes of a sample of a float32 tensor of that shape: up, and its adjoint's down."""
        return self.up.sample_bytes(shape), self.down.sample_bytes(shape)

    def num_tensors(self, codec: Codec, bundle: Bundle | None = None) -> int:
        """Tensors in one message over a cut: of one tensor, or of what the bundle divides."""
        large, parts = (1, 1) if bundle is None else (bundle.num_large, bundle.num_parts)
        return codec.tensors * large + parts - large

    def send(
        self, put: Callable[[Tensor], None], x: Crossing, bundle: Bundle | None = None
    ) -> None:
        """Pass the tensors of x's message to `put`."""
        self._send(self.up, put, x, (), bundle)

    def receive(
        self, get: Callable[[], Tensor], dtype: Dtypes, bundle: Bundle | None = None
    ) -> Any:
        """x, of `dtype` or of one for each tensor, from the tensors that `get` gives."""
        return self._receive(self.up, get, dtype, (), bundle)

    def send_adjoint(
        self,
        put: Callable[[Tensor], None],
        p: Crossing,
        size: int,
        key: Key = (),
        bundle: Bundle | None = None,
    ) -> None:
        """Send an adjoint of the mean over `size` samples; random numbers depend on `key` alone."""
        p = each(lambda x: x * size, p) if self.down.by_sample else p
        self._send(self.down, put, p, key, bundle)

    def receive_adjoint(
        self,
        get: Callable[[], Tensor],
        dtype: Dtypes,
        size: int,
        key: Key = (),
        bundle: Bundle | None = None,
    ) -> Any:
        """The adjoint that `send_adjoint` was given, with the same key."""
        p = self._receive(self.down, get, dtype, key, bundle)
        return each(lambda x: x / size, p) if self.down.by_sample else p

    def _send(
        self,
        codec: Codec,
        put: Callable[[Tensor], None],
        x: Crossing,
        key: Key,
        bundle: Bundle | None,
    ) -> None:
        parts = (x,) if isinstance(x, Tensor) else x
        large = len(parts) if bundle is None else bundle.num_large
        for i, part in enumerate(parts[:large]):
            for tensor in codec.encode(part, (*key, i)):
                put(tensor)
        for part in parts[large:]:
            put(part)

    def _receive(
        self,
        codec: Codec,
        get: Callable[[], Tensor],
        dtype: Dtypes,
        key: Key,
        bundle: Bundle | None,
    ) -> Any:
        count = 1 if bundle is None else bundle.num_large
        dtypes = (dtype,) * count if isinstance(dtype, torch.dtype) else dtype[:count]
        large = list[Tensor]()
        for i, kind in enumerate(dtypes):
            message = [get() for _ in range(codec.tensors)]
            large.append(codec.decode(message, kind, (*key, i)))
        if bundle is None:
            return large[0]
        return (*large, *(get() for _ in range(bundle.num_parts - count)))
