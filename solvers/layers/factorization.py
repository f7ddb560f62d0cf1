"""A non-negative factorization layer (DeepFacto: Khorram et al., arXiv 2105.00339)."""

import torch
from torch import Tensor

from hybrid.solvers.kernels.factors import EPSILON, multiply
from hybrid.solvers.layers.projection import Projection


class Factorization(Projection):
    r"""P(z) = M S with codes M >= 0 that best explain z for a dictionary S >= 0 (rank x channels).

    Rows of z are its pixels (N H W x C of an (N, C, H, W) tensor) or samples ((N, C)). The
    multiplicative updates of Lee and Seung (NIPS 2000), with T = max(0, z):

        M <- M * (T S^T) / (M S S^T + eps)
        S <- S * (M^T T) / (M^T M S + eps),   M^T T and M^T M averaged over mini-batches

    The layer solves for M with S fixed, by `iterations` updates from a start that depends on z
    only. S changes only in block-ADMM, so it is a buffer, not a parameter.
    """

    dictionary: Tensor

    def __init__(self, channels: int, rank: int, iterations: int = 30) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"the rank of a factorization is {rank}; it must be at least 1")
        self.iterations = iterations
        self.register_buffer("dictionary", torch.rand(rank, channels) + 0.1)

    def project(self, z: Tensor) -> Tensor:
        return self.compose(self.codes(z))

    @torch.no_grad()
    def codes(self, z: Tensor, start: Tensor | None = None, iterations: int = 0) -> Tensor:
        """M of z (N, C, H, W) or (N, C): (N, rank, H, W) or (N, rank).

        `start` is an M to begin with; with `iterations` 0 the layer's own number is used.
        """
        t, S = _rows(z).clamp_min(0), self.dictionary.to(z.dtype)
        right, gram = t @ S.T, S @ S.T
        if start is None:
            # the best multiple of one code for all factors
            scale = right.sum(1) / gram.sum().clamp_min(EPSILON)
            M = scale.clamp_min(EPSILON).unsqueeze(1).expand(-1, len(S)).contiguous()
        else:
            M = _rows(start)
        return _unflatten(multiply(right, gram, M, iterations or self.iterations), z)

    @torch.no_grad()
    def compose(self, codes: Tensor) -> Tensor:
        """M S, with the shape of z."""
        return _unflatten(_rows(codes) @ self.dictionary.to(codes.dtype), codes)

    @torch.no_grad()
    def statistics(self, z: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """(M^T T, M^T M) over the number of rows, in float64: what an update of S needs."""
        t, M = _rows(z).clamp_min(0).double(), _rows(codes).double()
        return M.T @ t / len(t), M.T @ M / len(t)

    @torch.no_grad()
    def update(self, cross: Tensor, gram: Tensor, iterations: int = 1) -> None:
        """S <- S * (M^T T) / (M^T M S + eps), from `statistics` or averages of them."""
        S = multiply(cross.T, gram.T, self.dictionary.double().T, iterations)
        self.dictionary.copy_(S.T)


def _rows(z: Tensor) -> Tensor:
    """(N, C, H, W) -> (N H W, C); (N, C) is not changed."""
    return z.flatten(2).transpose(1, 2).flatten(0, 1) if z.dim() > 2 else z


def _unflatten(rows: Tensor, z: Tensor) -> Tensor:
    """(N H W, c) -> (N, c, H, W) with N, H, W of z; (N, c) is not changed."""
    if z.dim() <= 2:
        return rows
    spatial = z.shape[2:]
    made = rows.view(len(z), -1, rows.shape[1]).transpose(1, 2)
    return made.reshape(len(z), rows.shape[1], *spatial)
