"""The multiplicative updates of a non-negative factorization (Lee and Seung, NIPS 2000)."""

import torch
from torch import Tensor

from hybrid.solvers.kernels import fused
from hybrid.solvers.kernels.choice import launcher

EPSILON = 1e-8


def multiply(right: Tensor, gram: Tensor, start: Tensor, iterations: int) -> Tensor:
    """`iterations` times M <- M * right / (M gram + eps), from M = `start` (rows, rank).

    With T ~ M S, right = T S^T and gram = S S^T step M; M^T T and M^T M, transposed, step S^T.
    """
    launch, narrow = launcher(right, gram, start), start.shape[1] <= fused.MAXIMUM_RANK
    if launch is not None and start.dtype == right.dtype == gram.dtype == torch.float32 and narrow:
        return fused.multiply(launch, right, gram, start, iterations, EPSILON)
    M = start
    for _ in range(iterations):
        M = M * (right / (M @ gram + EPSILON))
    return M
