"""Activations and adjoints in fewer bytes, for messages and stores."""

import torch
from torch import Tensor

from hybrid.solvers.kernels import fused
from hybrid.solvers.kernels.choice import launcher
from hybrid.solvers.kernels.coupling import wide
from hybrid.solvers.kernels.filters import pool, upsample


def pack(x: Tensor, dtype: torch.dtype, factor: int = 1) -> tuple[Tensor, Tensor | None]:
    """S x as `dtype`; for int8, round(S x / s) and s = max |S x| / 127.

    s is that of each sample and channel, (N, C, 1, 1), or without pixels of each sample, (N, 1).
    """
    launch = launcher(x)
    # settings are checked so that the squares cover the image; if they do not, torch cuts it off
    if launch is not None and x.dim() == 4 and not any(side % factor for side in x.shape[2:]):
        if dtype is torch.int8 or (factor > 1 and dtype in fused.NAMES):
            return fused.pack(launch, x, dtype, factor)
        if factor == 1:
            return x.to(dtype), None
    y = pool(wide(x), factor)
    if dtype is not torch.int8:
        return y.to(dtype), None
    pixels = tuple(range(min(2, y.dim() - 1), y.dim()))
    scale = (y.abs().amax(pixels, keepdim=True) / 127).to(x.dtype)
    divisor = wide(scale).clamp_min(torch.finfo(y.dtype).tiny)
    return (y / divisor).round().clamp(-127, 127).to(torch.int8), scale


def unpack(packed: Tensor, scale: Tensor | None, dtype: torch.dtype, factor: int = 1) -> Tensor:
    """S^+ y as `dtype`, where y is the result of `pack`."""
    launch = launcher(scale) if packed.dtype is torch.int8 else launcher(packed)
    useful = factor > 1 or packed.dtype is torch.int8
    if launch is not None and packed.dim() == 4 and useful and dtype in fused.NAMES:
        return fused.unpack(launch, packed, scale, dtype, factor)
    x = packed.to(dtype)
    return upsample(x if scale is None else x * scale.to(dtype), factor)
