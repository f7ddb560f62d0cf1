"""Block-ADMM in scaled form, straight from its formulas: one process, all blocks at hand."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybrid.solvers import Batch

Set = Callable[[Tensor], Tensor]


@dataclass
class ScaledADMM:
    """phi(f_{K-1}(Z_{K-1}), y) + sum_k rho_k/2 (||Z_k - f_{k-1}(Z_{k-1}) + U_k||^2 - ||U_k||^2).

    Lists run over k = 0..K-1; Z_0 are the images, and entry 0 of rho, U and the sets is unused.
    """

    blocks: list[nn.Module]
    batches: list[Batch]
    rho: list[float]
    learning_rate: float
    momentum: float
    lam_step: float
    kappa_step: float = 1.0
    theta_steps: int = 1
    z_steps: int = 1
    sets: list[Set] = field(default_factory=list)
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def __post_init__(self) -> None:
        self.K = len(self.blocks)
        nesterov = self.momentum > 0
        self.sgd = [
            torch.optim.SGD(f.parameters(), self.learning_rate, self.momentum, nesterov=nesterov)
            for f in self.blocks
        ]
        self.sets = self.sets or [lambda z: z] * self.K

    def start(self, adjoint: bool) -> None:
        """Z from one pass through the composed network, U = 0 or -p/rho; a list a mini-batch."""
        self.Z: list[list[Tensor]] = []
        self.U: list[list[Tensor]] = []
        self.X: list[list[Tensor]] = []
        for batch in self.batches:
            x = batch.images()
            activations = []
            for f in self.blocks:
                x = x.detach() if not adjoint else x.requires_grad_()
                activations.append(x)
                x = f(x)
            U = [torch.zeros_like(a) for a in activations]
            if adjoint:
                total = self.loss(x, batch.labels()) * len(batch)
                p = torch.autograd.grad(total, activations)
                U = [-p_k / rho for p_k, rho in zip(p, self.rho, strict=True)]
            held = [P(a.detach()) for P, a in zip(self.sets, activations, strict=True)]
            self.Z.append([activations[0].detach(), *held[1:]])
            self.X.append([a.detach() for a in activations])
            self.U.append(U)

    def sweep(self, order: str) -> list[tuple[float, float]]:
        """One visit of every mini-batch; (||Z - x||, ||rho (Z - old Z)||) at each cut."""
        visit = self._jacobi if order == "jacobi" else self._gauss_seidel
        squares = torch.zeros(self.K - 1, 2, dtype=torch.float64)
        for i in range(len(self.batches)):
            for k, (primal, dual) in enumerate(visit(i)):
                squares[k] += torch.stack((primal.square().sum(), dual.square().sum()))
        return [(float(r), float(s)) for r, s in squares.sqrt()]

    def online(self, order: str, sweeps: int) -> None:
        """Sweeps of a window whose Z are not kept: Z, then w, and between two sweeps U."""
        for sweep in range(sweeps):
            if sweep:
                for i, Z in enumerate(self.Z):
                    for k in range(1, self.K):
                        self.X[i][k] = self.blocks[k - 1](Z[k - 1]).detach()
                        self.U[i][k] = self.U[i][k] + self.kappa_step * (Z[k] - self.X[i][k])
            for i in range(len(self.batches)):
                if order == "jacobi":
                    for _ in range(self.z_steps):
                        self._hop(i)
                else:
                    for k in reversed(range(1, self.K)):
                        self.Z[i][k] = self._stepped(i, k, self.X[i][k])
                for k in range(self.K):
                    self._train(i, k)

    def _hop(self, i: int) -> None:
        for k in range(1, self.K):
            self.X[i][k] = self.blocks[k - 1](self.Z[i][k - 1]).detach()
        whole, self.z_steps = self.z_steps, 1
        self.Z[i][1:] = [self._stepped(i, k, self.X[i][k]) for k in range(1, self.K)]
        self.z_steps = whole

    def _jacobi(self, i: int) -> list[tuple[Tensor, Tensor]]:
        Z = self.Z[i]
        x = [f(z).detach() for f, z in zip(self.blocks[:-1], Z[:-1], strict=True)]
        new = [self._stepped(i, k, x[k - 1]) for k in range(1, self.K)]
        for k in range(self.K):
            self._train(i, k)
        return [self._settle(i, k, new[k - 1], x[k - 1]) for k in range(1, self.K)]

    def _gauss_seidel(self, i: int) -> list[tuple[Tensor, Tensor]]:
        residuals = []
        for k in range(self.K):
            if k:
                x = self.blocks[k - 1](self.Z[i][k - 1]).detach()
                residuals.append(self._settle(i, k, self._stepped(i, k, x), x))
            self._train(i, k)
        return residuals

    def _term(self, i: int, k: int, z: Tensor) -> Tensor:
        """What L has of f_k(z), summed over the samples."""
        x = self.blocks[k](z)
        if k == self.K - 1:
            return self.loss(x, self.batches[i].labels()) * len(z)
        return self.rho[k + 1] / 2 * (self.Z[i][k + 1] - x + self.U[i][k + 1]).square().sum()

    def _train(self, i: int, k: int) -> None:
        for _ in range(self.theta_steps):
            self.sgd[k].zero_grad()
            (self._term(i, k, self.Z[i][k]) / len(self.batches[i])).backward()
            self.sgd[k].step()

    def _stepped(self, i: int, k: int, x: Tensor) -> Tensor:
        rho, z = self.rho[k], self.Z[i][k]
        for _ in range(self.z_steps):
            z = z.detach().requires_grad_()
            whole = self._term(i, k, z) + rho / 2 * (z - x + self.U[i][k]).square().sum()
            z = z - self.lam_step / rho * torch.autograd.grad(whole, z)[0]
        return self.sets[k](z.detach())

    def _settle(self, i: int, k: int, new: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        dual = self.rho[k] * (new - self.Z[i][k])
        self.Z[i][k] = new
        self.U[i][k] = self.U[i][k] + self.kappa_step * (new - x)
        return new - x, dual
