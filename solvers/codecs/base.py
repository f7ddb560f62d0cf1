"""The base of codecs: how a tensor becomes the tensors of a message, and what arrives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.solvers.numerics.draws import Key

SAMPLES = 64
"""Of a message whose bytes are counted; groups fill up over several samples."""


class Codec(ABC):
    """x (N, ...) travels as `encode(x)`, and `decode` of that arrives, of the shape of x.

    It has no state and no weights. Rounding passes adjoints unchanged (straight through), and an
    adjoint is a tensor as any other, which a codec may encode in another way.
    """

    name: ClassVar[str]
    tensors: int = 1
    """Tensors of a message."""
    coarse: ClassVar[bool] = False
    """Whether it rounds so much that a wrong gradient could not be told from a right one."""
    by_sample: ClassVar[bool] = False
    """Whether it needs adjoints of a sample's loss, since those of a mean would be too small."""

    def __init__(self, adjoint: bool = False) -> None:
        self.adjoint = adjoint
        """Whether it encodes adjoints."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        """The tensors of x's message; random numbers are a function of `key` alone."""

    @abstractmethod
    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        """What arrives, as `dtype`, with the key of `encode`."""

    def sample_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
        """Bytes of a sample of that shape, in a message of many."""
        message = self.encode(torch.zeros(SAMPLES, *shape, dtype=dtype), (0,))
        return sum(tensor.nbytes for tensor in message) / SAMPLES


def largest(x: Tensor) -> Tensor:
    """max over the rows of (groups, rows, columns): (groups, 1, columns)."""
    count, rows, columns = x.shape
    if 1 < columns < 64 and rows % 8 == 0:  # torch goes through short columns one by one
        x = x.reshape(count, rows // 8, 8 * columns).amax(1).view(count, 8, columns)
    return x.amax(1, keepdim=True)
