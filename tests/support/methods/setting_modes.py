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
    "train.kernels": "torch",
    "train.report_every": 1,
    "train.evaluate_every": 2,
    "split.blocks": 2,
}
"""Three mini-batches an epoch: windows of 2 and of 1."""

FOLLOWED = ("split.balance", "split.inside", "split.speeds", "split.memory")
"""What cuts follow, which may come out the same."""
EXACT = ("split.blocks", "split.cuts", *FOLLOWED)
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
    tries: Mapping[str, list[Any]] | None = None,
) -> Iterator[Mode]:
    """Windows, of a method that alternates; what is the same without corrections."""
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
    yield Mode(solver, "all", {**never, "rounds.window": "all"}, {}, tries)


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
    rarely |= {**settings, **(corrected or {})}
    same = {**same, "rounds.serial_end": "the last round is serial anyway"}
    yield Mode(solver, "every second", rarely, same, tries)


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
        waits = {"fill.name": fill, "fill.beta": 0.1, "rounds.local_budget": [(4, 0), (0, 8)]}
        tries = {**tries, "fill.name": ["none", "penalty"]}
        yield Mode("ddg", f"{fill} in waits", waits, {}, tries)


def serial() -> Iterator[Mode]:
    """Back-propagation, with what else a run may have: schedules, replicas."""
    grid = {"split.replicas": 2}
    # five mini-batches an epoch, for rounds that end within it
    outer = {**grid, "data.limit": 40, "sync.steps": 2, "sync.lag": 1}
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
    near: Values = {"solver.rho": 0.2, **NEVER_RESTS}
    yield from windowed("block-admm", {"solver.rho": 0.2})
    hops = {"rounds.window": 2, "solver.order": "jacobi", "solver.z_steps": 2}
    yield Mode("block-admm", "hops", {**near, **hops})
    for solver in ("penalty", "augmented-lagrangian"):
        yield from windowed(solver, {"solver.beta": 0.1})
    window: Values = {"solver.beta": 0.1, **NEVER_RESTS, "rounds.window": 2}
    two = {**window, "rounds.sweeps": 2}
    # mini-batches of 16, or BatchNorm sees single samples
    large = {"split.replicas": 2, "train.batch_size": 16, "data.limit": 48}
    # a third epoch, for what the second one's residual leads to
    first = {"rounds.serial_epochs": 1, "train.epochs": 3}
    for name, settings in {
        "two sweeps in steps": {**two, "solver.lam_move": "step"},
        "replicas": {**two, **large},
        "first serially": {**two, **first},
    }.items():
        yield Mode("augmented-lagrangian", name, settings)


MODES = [
    *delayed(),
    *alone("petra", {"model.name": "revnet8"}),
    *serial(),
    *local(),
    *splitting(),
]
"""Those of every solver of this package."""

OTHERS: dict[str, list[Any]] = {
    # of any section
    "momentum": [0.25],
    "local_lr": [0.25],
    "clip_norm": [1e-3],
    "micro_batches": [2],
    "dir": ["/tmp"],
    "limit": [16],
    "validation": [1 / 3],
    "ema": [0.5],
    "frozen": [["fc"], {"fc": 1}],
    "report_every": [4],
    "label_smoothing": [0.1],
    "loss": ["mse"],
    "metric": ["loss", "accuracy"],
    "arguments": [{"gamma": 0.5}, {"maximize": True}],
    "interval": ["step"],
    "milestones": [[0.25]],
    "warmup_epochs": [0.3],
    "warmup_steps": [2],
    "vectors_lr": [0.05],
    "cuts": [["layer3.0"]],
    "timeout": [60.0],
    "window": [1, "all"],
    "sweeps": [3],
    "serial_epochs": [0.5],
    "local_budget": [[(4, 0), (0, 4)]],
    "gamma": [0.1, 0.2],
    "decay": [0.1],
    "history": [2],
    "constraint": ["box:0:0.5"],
    "head": ["mlp:4"],
    "gradient_shrinking": [0.5],
    "correct_every": [0, 3],
    "adjoints": ["int8"],
    # of one section
    "solver.messages": ["bfloat16", "int4"],
    "correction.messages": ["int8"],
    "solver.name": ["block-admm", "ddg"],
    "model.name": ["wrn-10-1"],
    "model.weights": ["none.safetensors"],
    "data.name": ["synthetic"],
    "fill.name": [{"fill.name": "penalty", "rounds.local_budget": [(4, 0), (0, 4)]}],
    "sync.name": ["all-reduce", "local-sgd"],
    "sampler.name": ["uniform", {"sampler.name": "selective-backprop", "sampler.lag": 2}],
    "sampler.assistant": ["sampler_assistants:narrow"],
    "links.kind": ["threads", "virtual"],
    "optimizer.name": ["sgd", "adamw", "nadamw", "muon", "soap", "NAdam"],
    "schedule.name": ["cosine", "linear", "step", "constant", "one-cycle"],
    "split.blocks": [3],
    "split.balance": ["even"],
    "split.speeds": [[1.0, 0.1]],
    "split.memory": [[1e-6, 1.0]],
    "split.replicas": [3],
    "solver.return_ratio": [1e-9],
    "solver.kappa_step": [0.5],
    "sampler.lag": [4],
    "sync.lag": [0],
    "sync.outer_momentum": [0.5],
}
"""What is tried of a key, where its type and half its value would not do; or with which others."""

LISTED = {
    "optimizer.sharded": "who computes what",
    "train.report_every": "how often a run reports",
    "train.evaluate_every": "how often it is tested",
    "train.verify": "what is compared before the first step",
    "train.kernels": "speed",
    "data.augment": "CIFAR's images are augmented, and no digits",
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
    "checkpoint.every": "what is kept",
    "checkpoint.steps": "what is kept",
    "checkpoint.minutes": "what is kept",
    "checkpoint.keep_last": "what is kept",
    "checkpoint.copies": "what is kept",
    "checkpoint.rollbacks": "a guard",
    "checkpoint.frozen": "what is kept",
}
"""What must not change the result, wherever it is not refused, and why."""

ELSEWHERE = (
    *("train.threads", "train.device", "train.compile"),  # other bits
    "train.deterministic",  # other algorithms of a GPU
    "solver.any_order",  # other bits from run to run
    "checkpoint.best",  # which epoch is the best would hang on a few images
)
"""What is not tried: tests of their own show what they do."""
