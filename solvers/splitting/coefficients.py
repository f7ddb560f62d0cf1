"""The current coefficients beta of one cut."""

from dataclasses import dataclass
from math import inf, log2

from torch import Tensor

from hybrid.solvers.kernels.operations import dot, wide

MAX_FACTOR = 2.0**10
"""Largest factor by which balancing changes beta from its setting, either way."""


@dataclass
class Coefficients:
    """beta at one cut, the same on both its sides.

    beta couples weights; lam_beta is that of the steps of lam and kappa. Both are divided by the
    activations' `energy`, and residual balancing multiplies them by `factor`.
    """

    beta: float
    lam_beta: float
    energy: float = 1.0
    factor: float = 1.0

    @property
    def weight_beta(self) -> float:
        """beta of the weights' sub-problems."""
        return self.beta * self.factor / self.energy

    @property
    def step_beta(self) -> float:
        """beta of the steps of lam and kappa."""
        return self.lam_beta * self.factor / self.energy

    def measure(self, x: Tensor) -> None:
        """Let `energy` be the mean ||x||^2 of a sample of x (N, ...), rounded to a power of two.

        Of zeros it is 1. The rounding leaves few values of beta, each of which a graph may contain.
        """
        x = wide(x)
        energy = float(dot(x, x)) / len(x)
        self.energy = 2.0 ** round(log2(energy)) if 0 < energy < inf else 1.0

    def balance(self, primal: float, dual: float, ratio: float) -> None:
        """Double both where the primal residual is `ratio` times the dual's, or halve them.

        Boyd et al., Foundations and Trends in Machine Learning 2011, section 3.4.1.
        """
        if primal > ratio * dual:
            self.factor = min(2 * self.factor, MAX_FACTOR)
        elif dual > ratio * primal:
            self.factor = max(self.factor / 2, 1 / MAX_FACTOR)
