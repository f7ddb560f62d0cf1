"""Messages between blocks: number formats and filters."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hybrid.solvers.kernels.operations import pack, unpack

WireFormat = Literal["float32", "bfloat16", "float16", "int8"]


class Wire:
    """Packs a tensor x for a cut and unpacks it on the other side.

    Sends S x (the mean over filter x filter pixels) in a number format; the receiver gets S^+ S x.
    That map is symmetric, so adjoints that are sent the same way are the exact adjoints of the
    network with S^+ S at its cuts. int8 sends round(x / s) with s = max |x| / 127 over each sample
    and channel (without pixels: over each sample), s in the format of x; rounding passes adjoints
    unchanged (straight through). float32 sends a tensor as it is, whatever its precision.
    """

    def __init__(self, number_format: WireFormat = "float32", filter: int = 1) -> None:
        self.format, self.filter = number_format, filter
        self.as_it_is = number_format == "float32" and filter == 1
        """Whether a message is the tensor itself."""

    @property
    def tensors(self) -> int:
        """Tensors in one message."""
        return 2 if self.format == "int8" else 1

    def send(self, put: Callable[[Tensor], None], x: Tensor) -> None:
        """Pass the tensors of x's message to `put`."""
        if self.as_it_is:
            put(x)
            return
        dtype = x.dtype if self.format == "float32" else getattr(torch, self.format)
        packed, scale = pack(x, dtype, self.filter)
        put(packed)
        if scale is not None:
            put(scale)

    def receive(self, get: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """x, of `dtype`, from the tensors that `get` gives."""
        if self.as_it_is:
            return get()
        packed = get()
        scale = get() if self.format == "int8" else None
        return unpack(
            packed, scale, packed.dtype if self.format == "float32" else dtype, self.filter
        )

    def send_adjoint(self, put: Callable[[Tensor], None], p: Tensor, size: int) -> None:
        """Send an adjoint of the mean over `size` samples; float16 needs it in per-sample scale."""
        self.send(put, p * size if self.format == "float16" else p)

    def receive_adjoint(self, get: Callable[[], Tensor], dtype: torch.dtype, size: int) -> Tensor:
        """The adjoint that `send_adjoint` was given."""
        p = self.receive(get, dtype)
        return p / size if self.format == "float16" else p
