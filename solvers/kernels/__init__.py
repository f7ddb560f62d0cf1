"""The element-wise work of the sub-problems, each in torch and as a fused kernel."""

from hybrid.solvers.kernels.choice import Kernels, choose
from hybrid.solvers.kernels.coupling import Coupling, couple
from hybrid.solvers.kernels.factors import multiply
from hybrid.solvers.kernels.filters import pool, pool_transpose, upsample
from hybrid.solvers.kernels.packing import pack, unpack
from hybrid.solvers.kernels.stepping import (
    Constraint,
    Stepped,
    ascend,
    complete_step,
    descend,
    step,
    step_limit,
)

__all__ = [
    "Constraint",
    "Coupling",
    "Kernels",
    "Stepped",
    "ascend",
    "choose",
    "complete_step",
    "couple",
    "descend",
    "multiply",
    "pack",
    "pool",
    "pool_transpose",
    "step",
    "step_limit",
    "unpack",
    "upsample",
]
