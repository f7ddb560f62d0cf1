"""Ways to run each solver, what is tried of each setting, and which must not change the result."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.settings.methods import known_settings

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

EXACT = ("split.blocks", "split.cuts", "split.balance")
"""What exact gradients do not depend on."""
SERIAL = ("rounds.correct_every", "rounds.serial_epochs")


@dataclass(frozen=True, eq=False)
class Mode:
    """A way to run a solver, and the settings it takes."""

    solver: str
    name: str
    settings: Values
    same: Mapping[str, str] = field(default_factory=dict)
    """Settings, or "setting=value", that must not change its result, and why; "": they must."""
    tries: Mapping[str, list[Any]] = field(default_factory=dict)
    """What is tried of a setting, in place of `OTHERS` and of what its type says."""

    def __str__(self) -> str:
        return f"{self.solver}, {self.name}"


NEVER_RESTS: Values = {"solver.return_ratio": 1e9}
"""No residual grows so much, and every one is over 1e-9 times the last: rounding decides nothing.

For runs whose residuals are compared, of methods that have the setting.
"""


def windowed(
    solver: str,
    close: Values,
    uncorrected: Mapping[str, str] | None = None,
    whole: Mapping[str, str] | None = None,
    tries: Mapping[str, list[Any]] | None = None,
) -> Iterator[Mode]:
    """Windows, of a method that alternates; what is the same without corrections, and of all."""
    window = {"rounds.window": 2, **close}
    two = {**window, "rounds.sweeps": 2}
    compared = NEVER_RESTS if NEVER_RESTS.keys() <= known_settings(solver, {}).keys() else {}
    tries = tries or {}
    yield Mode(solver, "one sweep", {**window, **compared}, {}, tries)
    yield Mode(solver, "two sweeps", {**two, **compared}, {}, tries)
    yield Mode(solver, "every second", {**window, "rounds.correct_every": 2}, {}, tries)
    yield Mode(solver, "two sweeps, rarely", {**two, "rounds.correct_every": 2}, {}, tries)
    never = {**window, "rounds.correct_every": 0}
    yield Mode(solver, "uncorrected", never, uncorrected or {}, tries)
    yield Mode(solver, "all", {**never, "rounds.window": "all"}, whole or {}, tries)


def alone(
    solver: str,
    settings: Values | None = None,
    corrected: Values | None = None,
    same: Mapping[str, str] | None = None,
    tries: Mapping[str, list[Any]] | None = None,
) -> Iterator[Mode]:
    """A method that trains alone; `corrected`: what it wants beside that where it is corrected."""
    settings, same, tries = settings or {}, same or {}, tries or {}
    yield Mode(solver, "alone", settings, same, tries)
    # five mini-batches: a window of one between two serial ones is exact
    rarely: Values = {"data.limit": 40, "rounds.window": 2, "rounds.correct_every": 2}
    yield Mode(solver, "every second", {**settings, **(corrected or {}), **rarely}, same, tries)


def delayed() -> Iterator[Mode]:
    """Two blocks, corrected so often, give DDG the delay of FDG: another solver is tried."""
    other = {"ddg": ["features-replay"], "features-replay": ["ddg"], "fdg": ["local-updates"]}
    for name, solvers in other.items():
        yield from alone(name, tries={"solver.name": solvers})
    tries = {"solver.name": other["ddg"]}
    yield Mode("ddg", "replicas", {"split.replicas": 2}, {}, tries)
    yield Mode("ddg", "no stash", {"solver.stash": False}, {}, tries)
    yield Mode("ddg", "first serially", {"rounds.serial_epochs": 1, "data.limit": 48}, {}, tries)
    for fill in ("augmented-lagrangian", "penalty"):
        waits = {"fill.name": fill, "fill.beta": 0.1, "rounds.waits": [(4, 0), (0, 8)]}
        tries = {**tries, "fill.name": ["none", "penalty"]}
        yield Mode("ddg", f"{fill} in waits", waits, {}, tries)


def by_units() -> Iterator[Mode]:
    """PD-ASGD, by its slots."""
    tries = {"solver.name": ["local-updates"]}
    yield from alone("pd-asgd", tries=tries)
    slots: dict[str, Values] = {
        "three slots": {},
        "two slots": {"solver.backward_slots": 1},
        "one slot": {"solver.backward_slots": 0, "solver.queue": 1},
    }
    for name, settings in slots.items():
        yield Mode("pd-asgd", name, {"split.blocks": 1, **settings}, {}, tries)


def serial() -> Iterator[Mode]:
    """Back-propagation, with what else a run may have: schedules, samplers, replicas."""
    grid = {"split.replicas": 2}
    # five mini-batches an epoch, for rounds that end within it
    outer = {**grid, "data.limit": 40, "sync.steps": 2, "sync.lag": 1}
    # few losses, known soon, to an assistant that learns fast from them
    soon = {"sampler.lag": 2, "train.epochs": 3}
    by_class = {"schedule.name": "ExponentialLR", "schedule.arguments": {"gamma": 0.9}}
    ways: dict[str, Values] = {
        "m = 1": {},
        "m = 4": {"solver.micro_batches": 4},
        "steps": {"schedule.name": "step"},
        "a schedule of torch's": by_class,
        "AdamW": {"optimizer.name": "adamw", "optimizer.lr": 1e-3},
        "virtual": {"links.kind": "virtual"},
        "replicas": grid,
        "local-sgd": {**grid, "sync.name": "local-sgd", "sync.steps": 2},
        "diloco": {**outer, "sync.name": "diloco"},
        "hpsgd": {**outer, "sync.name": "hpsgd"},
        "auto-assist": {**soon, "sampler.name": "auto-assist", "sampler.lr": 5.0},
        "selective-backprop": {**soon, "sampler.name": "selective-backprop"},
    }
    for name, settings in ways.items():
        yield Mode("backprop", name, settings, dict.fromkeys(EXACT, "gradients are exact"))


def local() -> Iterator[Mode]:
    """Local updates, by their style."""
    greedy = {"solver.style=chunked": "two chunks of two blocks are trained greedily"}
    two = dict.fromkeys(("split.cuts", *SERIAL), "two blocks that overlap are back-propagation")
    one = dict.fromkeys((*EXACT, *SERIAL), "one chunk of all blocks is back-propagation")
    yield from alone("local-updates", same=greedy)
    yield Mode("local-updates", "overlapping", {"solver.style": "overlapping"}, two)
    yield Mode("local-updates", "chunked", {"solver.style": "chunked", "solver.chunks": 1}, one)


def splitting() -> Iterator[Mode]:
    """Methods with auxiliary variables, which stay close to activations as small as those here."""
    unrecorded = {"rounds.window=1": "one sweep, and nothing recorded"}
    yield from windowed("auxnet", {}, unrecorded, tries={"solver.name": ["penalty"]})
    kept = {"data.augment": "records that are kept without corrections are of plain images"}
    near: Values = {"solver.rho": 0.2, **NEVER_RESTS}
    yield from windowed("block-admm", {"solver.rho": 0.2}, whole=kept)
    hops = {"rounds.window": 2, "solver.order": "jacobi", "solver.z_steps": 2}
    yield Mode("block-admm", "hops", {**near, **hops})
    layer = {"model.name": "factorized:small", "rounds.window": 2, "rounds.sweeps": 2}
    yield Mode("block-admm", "factorized", {**near, **layer})
    for solver in ("penalty", "augmented-lagrangian"):
        yield from windowed(solver, {"solver.beta": 0.1}, whole=kept)
    window: Values = {"solver.beta": 0.1, **NEVER_RESTS, "rounds.window": 2}
    two = {**window, "rounds.sweeps": 2}
    assist = {"sampler.name": "auto-assist", "sampler.lr": 5.0, "sampler.lag": 2}
    # mini-batches of 16, or BatchNorm sees single samples
    large = {"split.replicas": 2, "train.batch_size": 16, "data.limit": 48}
    # a third epoch, for what the second one's residual leads to
    first = {"rounds.serial_epochs": 1, "train.epochs": 3}
    for name, settings in {
        "auto-assist": {**window, **assist, "train.epochs": 3},
        "two sweeps in steps": {**two, "solver.lam_move": "step"},
        "replicas": {**two, **large},
        "first serially": {**two, **first},
    }.items():
        yield Mode("augmented-lagrangian", name, settings)


MODES = [
    *delayed(),
    *by_units(),
    *alone("petra", {"model.name": "revnet8"}),
    *serial(),
    *local(),
    *splitting(),
]
"""Those of every solver of this package."""

OTHERS: dict[str, list[Any]] = {
    "optimizer.vectors_lr": [0.05],
    "optimizer.sharded": [True],
    "delay.cap": [0.1],
    "model.name": ["wrn-10-1"],
    "model.weights": ["none.safetensors"],
    "model.factorize": ["layer3.0:2"],
    "data.name": ["other"],
    "data.dir": ["/tmp"],
    "sampler.name": ["backwards"],
    "sampler.gamma": [0.1],
    "sampler.decay": [0.1],
    "sampler.history": [2],
    "sampler.lag": [4],
    "data.limit": [16],
    "rounds.window": [1, "all"],
    "rounds.sweeps": [3],
    "rounds.correct_every": [0, 3],
    "rounds.serial_epochs": [0.5],
    "rounds.waits": [[(4, 0), (0, 4)]],
    "fill.balance_ratio": [1 + 1e-7],
    "fill.clip_norm": [1e-3],
    "fill.lam_beta": [0.02],
    "fill.momentum": [0.25],
    "fill.local_lr": [0.25],
    "fill.storage": ["bfloat16"],
    "split.blocks": [3],
    "split.cuts": [["layer3.0"]],
    "train.ema": [0.5],
    "train.frozen": [["fc"], {"fc": 1}],
    "train.report_every": [4],
    "train.loss": ["mse"],
    "train.label_smoothing": [0.1],
    "optimizer.name": ["sgd", "adamw", "nadamw", "muon", "soap", "NAdam"],
    "optimizer.arguments": [{"maximize": True}],
    "schedule.name": ["cosine", "linear", "step", "constant", "one-cycle"],
    "schedule.interval": ["step"],
    "schedule.arguments": [{"gamma": 0.5}],
    "schedule.milestones": [[0.25]],
    "schedule.warmup_epochs": [0.3],
    "schedule.warmup_steps": [2],
    "schedule.metric": ["accuracy"],
    "links.kind": ["threads", "virtual"],
    "links.timeout": [60.0],
    "split.replicas": [3],
    "split.side_by_side": ["peers"],
    "sync.name": ["all-reduce", "local-sgd"],
    "sync.messages": ["int8"],
    "sync.steps": [3],
    "sync.lag": [0],
    "sync.outer_momentum": [0.5],
    "data.workers": [1],
    "fill.name": ["penalty"],
    "data.validation": [1 / 3],
    "train.metric": ["loss"],
    "train.metric_mode": ["min"],
    "solver.local_lr": [0.25],
    "solver.momentum": [0.25],
    "solver.clip_norm": [1e-3],
    "solver.return_ratio": [1e-9],
    # the least over 1 in single precision: norms that are equal to the last bit are left alone
    "solver.balance_ratio": [1 + 1e-7],
    "solver.lam_beta": [0.02],
    "solver.kappa_step": [0.5],
    "solver.constraint": ["box:0:0.5"],
    "solver.head": ["mlp:4"],
    "solver.depth": [3],
    "solver.backward_slots": [0, 1, 2],
    "solver.gradient_shrinking": [0.5],
    "solver.micro_batches": [2],
    "correction.micro_batches": [2],
    "correction.clip_norm": [1e-3],
}
"""What is tried of a setting, where neither its type nor half its default says so."""

LISTED = {
    "optimizer.sharded": "who computes what",
    "train.report_every": "how often a run reports",
    "train.evaluate_every": "how often it is tested",
    "train.verify": "what is compared before the first step",
    "train.threads": "speed, but for rounding",
    "train.device": "speed",
    "train.kernels": "speed",
    "train.compile": "speed",
    "data.dir": "where the files are",
    "links.kind": "timing: threads and virtual links give the same bits",
    "links.device": "speed",
    "links.timeout": "a guard",
    "split.side_by_side": "speed",
    "links.gigabits_per_second": "the virtual clock",
    "links.latency_microseconds": "the virtual clock",
    "rounds.memory_gb": "a guard",
    "correction.recompute": "memory",
    "solver.recompute": "memory",
    "solver.any_order": "timing, which nobody can repeat",
    "checkpoint.every": "what is kept",
    "checkpoint.minutes": "what is kept",
    "checkpoint.keep_last": "what is kept",
    "checkpoint.rollbacks": "a guard",
}
"""What must not change the result, wherever it is not refused, and why."""
