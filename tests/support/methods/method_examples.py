"""Instances of every method, for the tests that all must pass."""

from typing import Any

from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    FeaturesReplay,
    LocalUpdates,
    Penalty,
    Petra,
    Solver,
)

PLAIN: dict[str, Solver] = {
    "backprop": Backprop(),
    "ddg": DDG(micro_batches=1),
    "fdg": FDG(micro_batches=1, gradient_shrinking=0.7),
    "features-replay": FeaturesReplay(micro_batches=1),
    "petra": Petra(micro_batches=1),
    "greedy": LocalUpdates(),
    "overlapping": LocalUpdates(style="overlapping", head="mlp:5"),
    "chunked": LocalUpdates(style="chunked", chunks=1),
}
"""Those that are SGD on one block."""

EXAMPLES: dict[str, Solver] = {
    **PLAIN,
    "ddg in parts": DDG(micro_batches=3, messages="int8", adjoints="int4"),
    "fdg in parts": FDG(micro_batches=2, messages="float16"),
    "features-replay in parts": FeaturesReplay(micro_batches=4, messages="bfloat16"),
    "petra in parts": Petra(micro_batches=3, messages="int8", adjoints="int3"),
    "penalty": Penalty(beta=0.1, momentum=0.5),
    "augmented-lagrangian": AugmentedLagrangian(beta=0.1, clip_norm=0.1),
    "block-admm": BlockADMM(rho=0.5, local_lr=0.05),
    "seidel": BlockADMM(rho=0.5, order="gauss-seidel", theta_steps=2, z_steps=2, momentum=0.5),
    "coupled in 16 bits": BlockADMM(rho=0.5, local_lr=0.05, filter=2, storage="bfloat16"),
}

IMPOSSIBLE: list[tuple[type[Solver], dict[str, Any]]] = [
    (Backprop, {"micro_batches": -1, "clip_norm": -1.0, "messages": "float64"}),
    (DDG, {"clip_norm": -1.0}),
    (FDG, {"gradient_shrinking": 1.5}),
    (Petra, {"micro_batches": -1, "messages": "int9", "adjoints": "int4:7"}),
    (LocalUpdates, {"style": "lazy", "chunks": 0, "head": "mlp:0"}),
    (AugmentedLagrangian, {"beta": -1.0, "local_lr": 0.0, "lam_step": -0.1, "clip_norm": -1.0}),
    (AugmentedLagrangian, {"filter": 0, "momentum": 1.0, "return_ratio": 0.0, "kappa_step": -1.0}),
    (AugmentedLagrangian, {"storage": "int3", "lam_start": "adjoin"}),
    (AugmentedLagrangian, {"multiplier_start": "adjoin"}),
    (BlockADMM, {"rho": -1.0, "theta_steps": 0, "z_steps": 0}),
    (BlockADMM, {"momentum": 1.0, "order": "seidel"}),
    (BlockADMM, {"constraint": "positive"}),
]
"""Values of settings, each rejected by itself."""
