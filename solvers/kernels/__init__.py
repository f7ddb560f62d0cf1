"""The element-wise work of the sub-problems: one signature each, torch and fused kernels."""

from solvers.kernels.choice import Kernels, choose
from solvers.kernels.coupling import Coupling, couple
from solvers.kernels.factors import multiply
from solvers.kernels.filters import pool, pool_transpose, upsample
from solvers.kernels.packing import pack, unpack
from solvers.kernels.stepping import Held, Stepped, ascend, descend, follow, settle, step

__all__ = [
    "Coupling",
    "Held",
    "Kernels",
    "Stepped",
    "ascend",
    "choose",
    "couple",
    "descend",
    "follow",
    "multiply",
    "pack",
    "pool",
    "pool_transpose",
    "settle",
    "step",
    "unpack",
    "upsample",
]
