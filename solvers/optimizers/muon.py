"""Muon: orthogonalized momentum for matrices and filters."""

from collections.abc import Callable, Iterable, Sequence
from math import sqrt

import torch
from torch import Tensor

from hybrid.solvers.optimizers.by_shape import ByShape, Group

Share = Callable[[Sequence[float], Callable[[int], Tensor], Sequence[Tensor]], list[Tensor]]
"""(costs, compute, like) -> all of compute(i), each computed on one replica: see `Sharing`."""
_DTYPES = "bfloat16", "float32", "float64"
COEFFICIENTS = 3.4445, -4.7750, 2.0315
NS_STEPS = 5
SMALLEST_NORM = 1e-7


class Muon(ByShape):
    r"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon), for the weights of a block.

        B <- mu B + (1 - mu) g                      g as a matrix, outputs x all other dimensions
        U <- NS((1 - mu) g + mu B)                  B itself without `nesterov`
        w <- (1 - lr wd) w - lr s U

    s is sqrt(max(1, outputs / others)). NS goes towards the nearest orthogonal matrix:
    X <- G / ||G||_F, then `NS_STEPS` times A = X X^T, X <- a X + (b A + c A A) X with
    (a, b, c) = `COEFFICIENTS`. It is computed in `ns_dtype`, by default in bfloat16 on a GPU and in
    the weights' format elsewhere.

    Matrices are orthogonalized one by one: in a batch of several the bits of one could depend on
    what else its block holds, and so on where the network is cut.

    On matrices alone, and in bfloat16, this is `torch.optim.Muon`, bit for bit; `ByShape` says how
    vectors are stepped.
    """

    name = "muon"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_dtype: str | None = None,
    ) -> None:
        if ns_dtype not in (None, *_DTYPES):
            raise ValueError(f"ns_dtype is {ns_dtype!r}; choose one of {', '.join(_DTYPES)}")
        settings: Group = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        settings |= {"weight_decay": weight_decay, "ns_dtype": ns_dtype}
        super().__init__(params, settings)
        self.sharing: Share | None = None
        """Divides NS among replicas that all make the same steps; None: each does all of it."""

    def count_operations(self) -> int:
        """Floating-point operations of all NS of a step."""
        groups = [group for group in self.param_groups if group["rule"] == self.name]
        return sum(count_operations(p) for g in groups for p in g["params"])

    def step_matrices(self, matrices: list[tuple[Tensor, Group]]) -> None:
        for p, group in matrices:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        if self.sharing is None:
            for p, group in matrices:
                self._move(p, self._update(p, group), group)
        elif matrices:
            weights = [p for p, _ in matrices]
            work = [float(count_operations(p)) for p, _ in matrices]
            updates = self.sharing(work, lambda i: self._update(*matrices[i]), weights)
            for (p, group), update in zip(matrices, updates, strict=True):
                self._move(p, update, group)

    def _update(self, p: Tensor, group: Group) -> Tensor:
        """U in the shape of w."""
        moved: Tensor = self.state[p]["momentum_buffer"]
        if group["nesterov"]:
            assert p.grad is not None
            moved = p.grad.lerp(moved, group["momentum"])
        return orthogonalize(moved.flatten(1), group["ns_dtype"]).view(p.shape)

    def _move(self, p: Tensor, update: Tensor, group: Group) -> None:
        """w <- (1 - lr wd) w - lr s U."""
        p.mul_(1 - group["lr"] * group["weight_decay"])
        scale = sqrt(max(1, len(p) / (p.numel() // len(p))))
        p.add_(update, alpha=-group["lr"] * scale)


def count_operations(p: Tensor) -> int:
    """Floating-point operations of NS on a parameter."""
    rows, columns = len(p), p.numel() // len(p)
    n, m = min(rows, columns), max(rows, columns)
    return NS_STEPS * (4 * n * n * m + 2 * n**3)


def orthogonalize(matrix: Tensor, ns_dtype: str | None = None) -> Tensor:
    """NS of `Muon`: singular values between about 0.7 and 1.2, singular vectors as they are."""
    a, b, c = COEFFICIENTS
    usual = torch.bfloat16 if matrix.is_cuda else matrix.dtype
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(getattr(torch, ns_dtype) if ns_dtype else usual)
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T.contiguous() if tall else x
