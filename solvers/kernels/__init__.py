"""The element-wise work of the sub-problems."""

from solvers.kernels.coupling import Coupling, couple, pool, pool_transpose, upsample

__all__ = ["Coupling", "couple", "pool", "pool_transpose", "upsample"]
