"""Ways to run every solver, what is tried of each setting, and which must not change the result."""

from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]
"""section.key -> value"""

TINY: Values = {
    "data.limit": 24,
    "train.epochs": 2,
    "train.batch_size": 8,
    "train.threads": 1,
    "train.report_every": 1,
    "split.blocks": 2,
}
"""Three mini-batches an epoch: windows of 2 and of 1."""

FILLING = ("penalty", "augmented-lagrangian")
STORING = (*FILLING, "block-admm")
CLOSE: dict[str, Values] = {
    "penalty": {"solver.beta": 0.1},
    "augmented-lagrangian": {"solver.beta": 0.1},
    "block-admm": {"solver.rho": 0.2},
}
"""lam stays close to activations that are as small as these."""
ALONE = ("ddg", "features-replay", "fdg", "petra", "pd-asgd", "ampnet", "local-updates")


@dataclass(frozen=True, eq=False)
class Mode:
    """A way to run a solver, and the settings it takes."""

    solver: str
    name: str
    settings: Values

    def __str__(self):
        return f"{self.solver}, {self.name}"


def _modes():
    yield Mode("backprop", "m = 1", {})
    yield Mode("backprop", "m = 4", {"solver.micro_batches": 4})
    yield Mode("backprop", "steps", {"schedule.name": "step"})
    by_class = {"schedule.name": "ExponentialLR", "schedule.arguments": {"gamma": 0.9}}
    yield Mode("backprop", "a schedule of torch's", by_class)
    yield Mode("backprop", "AdamW", {"optimiser.name": "adamw", "optimiser.lr": 1e-3})
    yield Mode("backprop", "virtual", {"links.kind": "virtual"})
    grid = {"split.replicas": 2}
    yield Mode("backprop", "replicas", grid)
    yield Mode("backprop", "local-sgd", {**grid, "sync.name": "local-sgd", "sync.steps": 2})
    # five mini-batches an epoch, for rounds that end within it
    outer = {**grid, "data.limit": 40, "sync.steps": 2, "sync.lag": 1}
    yield Mode("backprop", "diloco", {**outer, "sync.name": "diloco"})
    yield Mode("backprop", "hpsgd", {**outer, "sync.name": "hpsgd"})
    # few losses, known soon, to an assistant that learns fast from them
    soon = {"sampler.lag": 2, "train.epochs": 3}
    assist = {**soon, "sampler.name": "auto-assist", "sampler.lr": 5.0}
    yield Mode("backprop", "auto-assist", assist)
    yield Mode("backprop", "selective-backprop", {**soon, "sampler.name": "selective-backprop"})
    windows = {**CLOSE["penalty"], **assist, "rounds.window": 2}
    yield Mode("augmented-lagrangian", "auto-assist", windows)
    swept = {**grid, **CLOSE["penalty"], "rounds.window": 2, "rounds.sweeps": 2}
    swept |= {"train.batch_size": 16, "data.limit": 48}  # or BatchNorm sees single samples
    yield Mode("augmented-lagrangian", "replicas", swept)
    yield Mode("ddg", "replicas", grid)
    for solver in FILLING:
        # a third epoch, for what the second one's residual leads to
        gaps = {**CLOSE["penalty"], "train.epochs": 3, "rounds.gaps": [(8, 0), (0, 8)]}
        yield Mode(solver, "gaps", gaps)
        yield Mode(solver, "own gaps", {**gaps, "rounds.fill_step": "own"})
        some = {"rounds.gaps": [(4, 0), (0, 12)], "rounds.fill_samples": "largest"}
        yield Mode(solver, "gaps of a choice", {**gaps, **some})
        window = {"rounds.fill": True, "rounds.window": 2}
        yield Mode(solver, "gaps and a window", {**gaps, **window})
        yield Mode(solver, "no gaps", {})
    for solver in (*STORING, "auxnet"):
        window = {"rounds.window": 2, **CLOSE.get(solver, {})}
        yield Mode(solver, "one sweep", window)
        yield Mode(solver, "two sweeps", {**window, "rounds.sweeps": 2})
        yield Mode(solver, "every second", {**window, "rounds.correct_every": 2})
        yield Mode(
            solver, "two sweeps, rarely", {**window, "rounds.sweeps": 2, "rounds.correct_every": 2}
        )
        yield Mode(solver, "uncorrected", {**window, "rounds.correct_every": 0})
        whole = {**window, "rounds.window": "all", "rounds.correct_every": 0}
        yield Mode(solver, "all", whole)
    limit = {**CLOSE["penalty"], "rounds.window": 2, "rounds.sweeps": 2, "solver.lam_move": "step"}
    yield Mode("augmented-lagrangian", "two sweeps in steps", limit)
    hops = {
        **CLOSE["block-admm"],
        "rounds.window": 2,
        "solver.order": "jacobi",
        "solver.z_steps": 2,
    }
    yield Mode("block-admm", "hops", hops)
    for solver in STORING:
        # five mini-batches: two probes an epoch, and in the last one two sweeps a window
        pace = {
            **CLOSE[solver],
            "rounds.window": "auto",
            "rounds.window_limit": 2,
            "rounds.sweeps": 2,
        }
        pace |= {"rounds.residual_limit": 1e3, "data.limit": 40, "train.epochs": 4}
        yield Mode(solver, "auto", pace)
    layer = {"model.factorise": "layer2.0:2", "rounds.window": 2, "rounds.sweeps": 2}
    layer |= CLOSE["block-admm"]
    yield Mode("block-admm", "factorised", layer)
    for solver in ALONE:
        model = {"model.name": "revnet8"} if solver == "petra" else {}
        yield Mode(solver, "alone", model)
        # five mini-batches: a window of one between two serial ones is exact
        parts = {"solver.micro_batches": 4} if solver == "ampnet" else {}
        corrected = {**parts, "data.limit": 40, "rounds.window": 2, "rounds.correct_every": 2}
        yield Mode(solver, "every second", {**model, **corrected})
    first: dict[str, Values] = {
        "ddg": {"data.limit": 48},
        # a third epoch, for what the second one's residual leads to
        "augmented-lagrangian": {
            **CLOSE["penalty"],
            "train.epochs": 3,
            "rounds.window": 2,
            "rounds.sweeps": 2,
        },
    }
    for solver, settings in first.items():
        yield Mode(solver, "first serially", {"rounds.serial_epochs": 1, **settings})
    slots: dict[str, Values] = {
        "three slots": {},
        "two slots": {"solver.backward_slots": 1},
        "one slot": {"solver.backward_slots": 0, "solver.queue": 1},
        "current": {"solver.weights": "current"},
    }
    for name, settings in slots.items():
        yield Mode("pd-asgd", name, {"split.blocks": 1, **settings})
    stops: dict[str, Values] = {
        "one block": {"split.blocks": 1},
        "one key": {"solver.max_active_keys": 1},
        "current": {"solver.weights": "current"},
        "exits": {"solver.exits": 0.5, "solver.micro_batches": 4},
    }
    for name, settings in stops.items():
        yield Mode("ampnet", name, settings)
    yield Mode("local-updates", "overlapping", {"solver.style": "overlapping"})
    yield Mode("local-updates", "chunked", {"solver.style": "chunked", "solver.chunks": 1})


MODES = list(_modes())

OTHERS: dict[str, list[Any]] = {
    "model.name": ["preact-resnet8"],
    "model.shortcut": ["projection"],
    "model.factorise": ["layer2.0:3"],
    "data.name": ["other"],
    "data.dir": ["/tmp"],
    "sampler.name": ["backwards"],
    "sampler.gamma": [0.1],
    "sampler.decay": [0.1],
    "sampler.history": [2],
    "sampler.lag": [4],
    "data.limit": [16],
    "data.cutout": [2],
    "rounds.window": [1, "all", "auto"],
    "rounds.window_limit": [1],
    "rounds.residual_limit": [1e-6, 1e3],
    "rounds.sweeps": [3],
    "rounds.correct_every": [0, 3],
    "rounds.serial_epochs": [0.5],
    "rounds.gaps": [[], [(4, 0), (0, 4)]],
    "split.blocks": [3],
    "split.cuts": [["layer3.0"]],
    "train.ema": [0.5],
    "train.report_every": [4],
    "train.loss": ["mse"],
    "train.label_smoothing": [0.1],
    "optimiser.name": ["sgd", "adamw", "NAdam"],
    "optimiser.arguments": [{"maximize": True}],
    "schedule.name": ["cosine", "linear", "step", "constant", "one-cycle"],
    "schedule.interval": ["step"],
    "schedule.arguments": [{"gamma": 0.5}],
    "schedule.milestones": [[0.25]],
    "schedule.warmup_epochs": [0.3],
    "links.timeout": [60.0],
    "split.replicas": [3],
    "split.side_by_side": ["peers"],
    "sync.name": ["all-reduce", "local-sgd"],
    "sync.messages": ["int8"],
    "sync.steps": [3],
    "sync.lag": [0],
    "sync.outer_momentum": [0.5],
    "data.workers": [1],
    "data.worker_kind": ["forkserver"],
    "solver.local_lr": [0.25],
    "solver.momentum": [0.25],
    "solver.clip_norm": [1e-3],
    "solver.return_ratio": [1e-9],
    "solver.balance_ratio": [1.01],
    "solver.dual_limit": [1e-6],
    "solver.lam_beta": [0.02],
    "solver.kappa_step": [0.5],
    "solver.constraint": ["box:0:0.5"],
    "solver.head": ["mlp:4"],
    "solver.depth": [3],
    "solver.backward_slots": [0, 1, 2],
    "solver.gradient_shrinking": [0.5],
    "solver.max_active_keys": [1, 2],
    "solver.min_update_frequency": [2],
    "solver.exits": [0.75],
    "solver.micro_batches": [2],
    "correction.micro_batches": [2],
    "correction.clip_norm": [1e-3],
}
"""What is tried of a setting, where neither its type nor half its default says so."""

LISTED = {
    "train.report_every": "how often a run reports",
    "train.evaluate_every": "how often it is tested",
    "train.threads": "speed, but for rounding",
    "train.device": "speed",
    "train.kernels": "speed",
    "train.compile": "speed",
    "data.dir": "where the files are",
    "links.kind": "timing: threads and virtual links give the same bits",
    "links.gpu_aware": "speed",
    "links.timeout": "a guard",
    "split.side_by_side": "speed",
    "links.gigabits_per_second": "the virtual clock",
    "links.latency_microseconds": "the virtual clock",
    "rounds.memory_gb": "a guard",
    "correction.recompute": "memory",
    "solver.recompute": "memory",
    "solver.threads": "speed",
    "solver.any_order": "timing, which nobody can repeat",
    "checkpoint.every": "what is kept",
    "checkpoint.minutes": "what is kept",
    "checkpoint.keep_last": "what is kept",
    "checkpoint.best": "what is kept",
    "checkpoint.rollbacks": "a guard",
}
"""What must not change the result, wherever it is not refused, and why."""

GREEDY = ("local-updates, alone", "local-updates, every second")
SERIAL = ("rounds.correct_every", "rounds.serial_epochs")
EXACT = ("split.blocks", "split.cuts", "split.balance", "split.inside")
"""What exact gradients do not depend on."""
