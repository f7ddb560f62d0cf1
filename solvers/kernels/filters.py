"""The downsampling filter S of a cut, and its adjoint, in torch on any device."""

from torch import Tensor
from torch.nn import functional as F


def pool(x: Tensor, factor: int) -> Tensor:
    """S x: the mean over factor x factor squares of pixels."""
    return x if factor == 1 else F.avg_pool2d(x, factor)


def pool_transpose(y: Tensor, factor: int) -> Tensor:
    """S^T y: each value spread evenly over its square."""
    return y if factor == 1 else upsample(y, factor) / factor**2


def upsample(y: Tensor, factor: int) -> Tensor:
    """S^+ y = factor^2 S^T y: each value repeated over its square."""
    return y if factor == 1 else F.interpolate(y, scale_factor=factor, mode="nearest")
