"""Relatives of block-ADMM: proximal and linearized ADMM, and rates on a convex chain.

    python docs/benchmarks/admm_relatives.py proximal [--seeds 0 1 2] [--rows "3 steps"]
    python docs/benchmarks/admm_relatives.py rates
    python docs/benchmarks/admm_relatives.py table

    proximal    proximal and linearized parallel ADMM (following arXiv 2310.15334) of ResNet-8 in
                four blocks on digits, 10 epochs, mini-batches of 128, SGD (Nesterov) at 0.1
    rates       a chain of linear blocks with a quadratic loss, in float64: the residual's measured
                rate, the spectral radius of a visit, and that of a step of gradient descent

What the JSON holds is not measured again.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import linear_regression
from typing import Any

import measuring
import torch
from torch import Tensor

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.rounds.phase_report import DivergedError
from hybrid.solvers import BlockADMM
from hybrid.solvers.base import program_of
from hybrid.solvers.kernels.operations import Stepped, complete_step, descend
from hybrid.solvers.splitting.block_admm import BlockADMMProgram
from hybrid.solvers.windows import Batch, PhaseStats, Rows

RAW = measuring.Raw(__file__)


@dataclass(frozen=True)
class ProximalADMM(BlockADMM):
    """Block-ADMM whose sub-problems have a proximal term, which holds them to their old values.

    w_k:  theta_steps on its term + tau_w/2 ||w_k - old w_k||^2
    Z_k:  z_steps on its term + tau_z rho/2 ||Z_k - old Z_k||^2
    """

    tau_w: float = 0.0
    tau_z: float = 0.0


@program_of(ProximalADMM)
class ProximalADMMProgram(BlockADMMProgram):
    """The first step on a sub-problem is at its old value, where the term has no gradient."""

    solver: ProximalADMM

    def _z_update(
        self,
        batch: Batch,
        rows: Rows,
        x: Tensor,
        p_in: Tensor | None = None,
        steps: int | None = None,
    ) -> Stepped:
        variables, solver = self.variables, self.solver
        old, new = self.store.raw("lam", rows), variables.lam(rows)
        kappa, beta = variables.multiplier("kappa_in", rows), solver.beta
        for number in range(solver.z_steps if steps is None else steps):
            if number or p_in is None:
                p_in = self._adjoint(batch, rows, new)[1]
            pull = solver.tau_z * solver.rho * (new - old)
            new = descend(new, x, kappa, p_in + pull, beta, self._eta)
        new = variables.constraint_before.project(new)
        return complete_step(new, old, x, kappa, beta, solver.kappa_rate * solver.rho)

    def _weight_steps(self, batch: Batch, rows: Rows) -> None:
        weights = [p for p in self.block.module.parameters() if p.requires_grad]
        old = [p.detach().clone() for p in weights]
        for number in range(self.solver.theta_steps):
            if number:
                self.gradient(batch, rows, False, PhaseStats(), number)
                for p, before in zip(weights, old, strict=True):
                    if p.grad is not None:
                        p.grad.add_(p.detach() - before, alpha=self.solver.tau_w)
            self._step(batch)


def rows() -> dict[str, BlockADMM]:
    common: dict[str, Any] = {"rho": 0.1, "kappa_step": 0.1, "order": "jacobi", "local_lr": 1.0}
    three: dict[str, Any] = {"theta_steps": 3, "z_steps": 3, "lam_step": 0.3}
    made = {f"1 step, lam_step {s:g}": BlockADMM(lam_step=s, **common) for s in (1.0, 0.3, 0.1)}
    made["3 steps"] = BlockADMM(**three, **common)
    for tau_z, tau_w in ((1.0, 1.0), (3.0, 10.0)):
        name = f"3 steps, tau_z {tau_z:g}, tau_w {tau_w:g}"
        made[name] = ProximalADMM(tau_z=tau_z, tau_w=tau_w, **three, **common)
    return made


def proximal(run: Any) -> None:
    for seed in run.seeds:
        for name, solver in rows().items():
            if run.rows not in name or RAW.get("proximal", name, str(seed)):
                continue
            torch.manual_seed(seed)
            trainer = Trainer(
                split(models.build("resnet8", 10, 1, 8), 4),
                solver,
                window="all",
                correct_every=0,
                train={"threads": 1, "seed": seed, "evaluate_every": 1000},
                optimizer={"lr": 0.1},
                quiet=True,
            )
            found = {"accuracy": 0.0, "seconds": 0.0}
            with suppress(DivergedError):
                summary = trainer.fit(*data.load("digits"), epochs=10)
                found = {"accuracy": summary["test_accuracy"], "seconds": summary["train_seconds"]}
            RAW.keep("proximal", name, str(seed), value=found)
            print(name, seed, found, flush=True)


def rates() -> None:
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "tests/support/references")]
    from linear_chain import DECAY, RATE, linear_chain, residuals, spectral_radius

    assert DECAY > 0, "or the ridge has no unique minimum"
    for K in 2, 3, 5:
        problem, objective = linear_chain(K)
        W = problem.blocks.model.get_parameter("0.weight")
        hessian = torch.autograd.functional.hessian(objective, W.detach()).view(W.numel(), -1)
        least, most = torch.linalg.eigvalsh(hessian)[[0, -1]].tolist()
        descent = max(abs(1 - RATE * least), abs(1 - RATE * most))
        for order in "jacobi", "gauss-seidel":
            for lam_step, kappa_step, steps in ((0.4, 1.0, 1), (0.4, 1.0, 2), (0.3, 0.1, 1)):
                more: Any = {"order": order, "lam_step": lam_step, "kappa_step": kappa_step}
                more |= {"theta_steps": steps, "z_steps": steps}
                solver = BlockADMM(rho=1.0, local_lr=1.0, return_ratio=1e9, **more)
                problem, _ = linear_chain(K)
                radius = spectral_radius(problem, solver)
                visits = round(log(1e-11) / log(radius))
                measured = residuals(problem, solver, visits)[visits // 2 :]
                slope, _ = linear_regression(range(len(measured)), [*map(log, measured)])
                name = f"{lam_step:g}, {kappa_step:g}, {steps}"
                found = {"measured": exp(slope), "radius": radius, "descent": descent}
                RAW.keep("rates", str(K), name, order, value=found)


def main() -> None:
    run = measuring.options(__doc__, what=("proximal", "rates", "table"), seeds=[0, 1, 2], rows="")
    torch.set_num_threads(1)
    if run.what == "proximal":
        proximal(run)
    if run.what == "rates":
        rates()
    lines = []
    for name, seeds in RAW.get("proximal").items():
        accuracies = [100 * found["accuracy"] for found in seeds.values()]
        each = ", ".join(f"{a:.1f}" for a in accuracies)
        lines.append((name, measuring.spread(accuracies), each))
    measuring.show("proximal | accuracy, % | by seed", lines)
    lines = []
    for K, settings in RAW.get("rates").items():
        for name, orders in settings.items():
            pairs = [f"{o['measured']:.4f} / {o['radius']:.4f}" for o in orders.values()]
            lines.append((K, name, *pairs, f"{orders['jacobi']['descent']:.4f}"))
    measuring.show("K | lam_step, kappa_step, steps | jacobi | gauss-seidel | descent", lines)


if __name__ == "__main__":
    main()
