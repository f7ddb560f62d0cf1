"""SOAP: Adam in the eigenbasis of a matrix's gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid.solvers.optimizers.by_shape import ByShape, Group


class Soap(ByShape):
    r"""Following SOAP (Vyas et al., arXiv 2409.11321), for the weights of a block.

        L <- b2 L + (1 - b2) g g^T,   R <- b2 R + (1 - b2) g^T g    g: outputs x all others
        M <- b1 M + (1 - b1) g
        P, Q <- QR(L P), QR(R Q) every `frequency` steps
        S <- b2 S + (1 - b2) (P^T g Q)^2
        N = P^T M Q / (1 - b1^t) / (sqrt(S / (1 - b2^t)) + eps)
        w <- (1 - lr wd) w - lr P N Q^T

    The first gradient gives L = g g^T, R = g^T g and their eigenvectors P, Q, and moves nothing: in
    its own basis it is a diagonal and rounding errors, which the division would make large. A side
    longer than `max_dim` is not rotated: its P or Q is 1.

    Adam's own basis is an accident of how weights are written down. In this one the curvature is
    nearly diagonal, and late gradients then do less harm (following the summary of arXiv
    2602.03515).

    It keeps M, S, and two square matrices for each side. `ByShape` says how vectors are stepped.
    """

    name = "soap"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        frequency: int = 10,
        max_dim: int = 4096,
    ) -> None:
        if frequency < 1:
            raise ValueError(f"frequency is {frequency}; it must be at least 1 step")
        settings: Group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings |= {"frequency": frequency, "max_dim": max_dim}
        super().__init__(params, settings)

    def step_matrices(self, matrices: list[tuple[Tensor, Group]]) -> None:
        for p, group in matrices:
            assert p.grad is not None
            state, g = self.state[p], p.grad.flatten(1)
            g = g.to(torch.promote_types(g.dtype, torch.float32))
            if first := not state:
                state.update(step=0, exp_avg=torch.zeros_like(g), exp_avg_sq=torch.zeros_like(g))
            left, right = _basis(state, "left", g, group), _basis(state, "right", g.T, group)
            if first and not (left is None and right is None):
                continue
            update = self._update(state, g, left, right, group)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.view(p.shape), alpha=-group["lr"])

    def _update(
        self, state: Group, g: Tensor, left: Tensor | None, right: Tensor | None, group: Group
    ) -> Tensor:
        """P N Q^T."""
        (b1, b2), t = group["betas"], state["step"] + 1
        m = state["exp_avg"].lerp_(g, 1 - b1)
        s = state["exp_avg_sq"].lerp_(_rotated(g, left, right).square(), 1 - b2)
        n = _rotated(m, left, right) / (1 - b1**t) / ((s / (1 - b2**t)).sqrt() + group["eps"])
        state["step"] = t
        left, right = (basis if basis is None else basis.T for basis in (left, right))
        return _rotated(n, left, right)


def _basis(state: Group, side: str, g: Tensor, group: Group) -> Tensor | None:
    """P of the side that the rows of g are; None: 1."""
    if len(g) > group["max_dim"]:
        return None
    basis, moment = f"{side}_basis", g @ g.T
    if side not in state:
        state[side], state[basis] = moment, _eigenvectors(moment)
    else:
        state[side].lerp_(moment, 1 - group["betas"][1])
        if (state["step"] + 1) % group["frequency"] == 0:
            state[basis] = torch.linalg.qr(state[side] @ state[basis])[0].contiguous()
    turned: Tensor = state[basis]
    return turned


def _eigenvectors(moment: Tensor) -> Tensor:
    """Eigenvectors of a symmetric matrix (n, n); any basis where a training diverges."""
    largest = moment.abs().max()
    try:
        scaled = (moment.double() / largest).nan_to_num(0.0, 0.0, 0.0)
        vectors: Tensor = torch.linalg.eigh(scaled)[1]
        return vectors.to(moment.dtype).contiguous()
    except RuntimeError:  # it does not converge
        return torch.eye(len(moment), dtype=moment.dtype, device=moment.device)


def _rotated(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """left^T x right, where None is 1."""
    x = x if left is None else left.T @ x
    return x if right is None else x @ right
