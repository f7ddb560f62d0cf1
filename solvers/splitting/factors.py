"""DeepFacto: a factorization layer trained as an ADMM constraint (arXiv 2105.00339, section 4)."""

import torch
from torch import Tensor

from hybrid.solvers.layers.projection import Factorization
from hybrid.solvers.splitting.variables import Store
from hybrid.solvers.windows import Rows


class FactorCut:
    r"""The auxiliary variables of a cut with Z ~ M S, on the rank that owns Z.

    It stores, for each sample, the codes M and the scaled dual V of the constraint Z = M S. The
    input of the block after the cut is M S. A visit, with rho of the constraint Z = x and rho_m of
    Z = M S:

        T = max(0, Z + V);  M <- M * (T S^T) / (M S S^T + eps);  S <- S * (M^T T) / (M^T M S + eps)
        Z <- (rho (x - U) + rho_m (M S - V) - p_in) / (rho + rho_m);   V <- V + Z - M S

    where M^T T and M^T M are exponential averages over mini-batches, with weight `memory`.
    """

    def __init__(self, layer: Factorization, store: Store, memory: float = 0.9) -> None:
        self.layer, self.memory = layer, memory
        self._store = store
        self._averages: tuple[Tensor, Tensor] | None = None

    def record(self, rows: Rows, z: Tensor) -> None:
        """Start M and V for new Z; the first time S as well."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self._averages is None:
            self._start_dictionary(z)
        self._store.put("codes", rows, self.layer.codes(z))
        self._store.put("factor_dual", rows, torch.zeros_like(z))

    def input(self, rows: Rows) -> Tensor:
        """Compute M S, the input of the block after the cut."""
        return self.layer.compose(self._store.get("codes", rows))

    def update_factors(self, rows: Rows, z: Tensor) -> None:
        """Step M, then S."""
        t = z + self._store.get("factor_dual", rows)
        codes = self.layer.codes(t, start=self._store.get("codes", rows), iterations=1)
        self._store.put("codes", rows, codes)
        assert self._averages is not None
        pairs = zip(self._averages, self.layer.statistics(t, codes), strict=True)
        cross, gram = (self.memory * old + (1 - self.memory) * new for old, new in pairs)
        self._averages = cross, gram
        self.layer.update(*self._averages)

    def step(self, rows: Rows, anchor: Tensor, p_in: Tensor, rho: float, rho_m: float) -> Tensor:
        """Step Z, for `anchor` = x - U, and V; return Z."""
        composed = self.input(rows)
        dual = self._store.get("factor_dual", rows)
        z = (rho * anchor + rho_m * (composed - dual) - p_in) / (rho + rho_m)
        self._store.put("factor_dual", rows, dual + z - composed)
        return z

    def state(self) -> dict[str, Tensor]:
        names = ("factors.cross", "factors.gram")
        return dict(zip(names, self._averages, strict=True)) if self._averages else {}

    def load_state(self, cross: Tensor, gram: Tensor) -> None:
        device = self.layer.dictionary.device
        self._averages = cross.to(device), gram.to(device)

    def _start_dictionary(self, z: Tensor, rounds: int = 50) -> None:
        """Alternate the updates of M and S on the first mini-batch, from the layer's random S."""
        scale = (z.clamp_min(0).mean() / self.layer.dictionary.mean()).clamp_min(1e-3)
        self.layer.dictionary.mul_(scale)
        codes = self.layer.codes(z)
        for _ in range(rounds):
            codes = self.layer.codes(z, start=codes, iterations=1)
            self._averages = self.layer.statistics(z, codes)
            self.layer.update(*self._averages)
