"""A setting that a user gives acts, or is refused with the reason: over all settings, all modes.

A triple is (setting, solver, mode). `make test` tries a part of them, chosen by a hash; all with
SETTINGS_SHARE=1, or `pytest -m slow`; `python -m tests.test_settings_act` counts what they do.
"""

import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from torch import Tensor

from hybrid import EarlyStopping, data
from hybrid.cuts import costs, partition
from hybrid.data import Augmentation, Dataset
from hybrid.rounds.report import DivergedError
from hybrid.runs import build
from hybrid.samplers import SAMPLERS, Uniform
from hybrid.settings.config import Config
from hybrid.settings.methods import known_settings
from solvers import Backprop, registry

SHARE = int(os.environ.get("SETTINGS_SHARE", "24"))
"""`make test` tries one triple of so many."""

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
ALONE = ("ddg", "features-replay", "fdg", "petra", "local-updates")


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
        corrected = {"data.limit": 40, "rounds.window": 2, "rounds.correct_every": 2}
        yield Mode(solver, "every second", {**model, **corrected})
    yield Mode("local-updates", "overlapping", {"solver.style": "overlapping"})
    yield Mode("local-updates", "chunked", {"solver.style": "chunked", "solver.chunks": 1})


MODES = list(_modes())

OTHERS: dict[str, list[Any]] = {
    "model.name": ["preact-resnet8"],
    "model.shortcut": ["projection"],
    "model.factorise": ["layer2.0:3"],
    "data.name": ["other"],
    "data.dir": ["/tmp"],
    "data.sampler": ["backwards"],
    "data.limit": [16],
    "data.cutout": [2],
    "rounds.window": [1, "all", "auto"],
    "rounds.window_limit": [1],
    "rounds.residual_limit": [1e-6, 1e3],
    "rounds.sweeps": [3],
    "rounds.correct_every": [0, 3],
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
    "solver.gradient_shrinking": [0.5],
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
    "links.gigabits_per_second": "the virtual clock",
    "links.latency_microseconds": "the virtual clock",
    "rounds.memory_gb": "a guard",
    "correction.recompute": "memory",
    "solver.recompute": "memory",
    "checkpoint.every": "what is kept",
    "checkpoint.minutes": "what is kept",
    "checkpoint.keep_last": "what is kept",
    "checkpoint.best": "what is kept",
    "checkpoint.rollbacks": "a guard",
}
"""What must not change the result, wherever it is not refused, and why."""

GREEDY = ("local-updates, alone", "local-updates, every second")
EXACT = ("split.blocks", "split.cuts", "split.balance")
"""What exact gradients do not depend on."""


class Result(NamedTuple):
    weights: Tensor
    cuts: tuple[str, ...]


def triples():
    """Every setting in every mode."""
    return [(setting, mode) for mode in MODES for setting in known_settings(mode.solver)]


def tried(setting, mode, share):
    """Whether a triple is of the part of `share`; the same everywhere."""
    return crc32(f"{setting} {mode}".encode()) % share == 0


def outcome(setting, mode):
    """acts, refused or listed; AssertionError for a triple that is none of them."""
    found = {_outcome(setting, value, mode) for value in others(setting, mode)}
    return "acts" if "acts" in found else min(found)


def _outcome(setting, value, mode):
    base = trained(mode)
    try:
        result = train(_asked(mode, **{setting: value}), keeps=setting.startswith("checkpoint"))
    except DivergedError:
        return "acts"
    except ValueError as error:
        return _refused(f"{mode}: {setting} = {value!r}", str(error), [setting, *mode.settings])
    same = torch.equal(result.weights, base.weights)
    listed = _listed(setting, value, mode, result, base)
    if listed:
        # threads add in another order
        assert same or setting == "train.threads", (
            f"{mode}: {setting} = {value!r} changes the result ({listed})"
        )
        return "listed"
    assert not same, f"{mode}: {setting} = {value!r} changes nothing"
    return "acts"


def _refused(what, why, named):
    """The reason names the setting, or one of the mode's that it is at odds with."""
    assert any(key.split(".")[1] in why for key in named), f"{what} is refused for {why}"
    return "refused"


def _listed(setting, value, mode, result, base):
    if setting == "split.balance" and result.cuts == base.cuts:
        return "the cuts come out the same"
    if mode.solver == "backprop" and setting in EXACT:
        return "exact gradients do not depend on the cuts"
    if mode.name == "chunked" and setting in (*EXACT, "rounds.correct_every"):
        return "one chunk of all blocks is back-propagation"
    if mode.name == "overlapping" and setting in ("split.cuts", "rounds.correct_every"):
        return "two blocks that overlap are back-propagation"
    if f"{mode}".startswith(GREEDY) and value == "chunked":
        return "two chunks of two blocks are trained greedily"
    if mode.name == "no gaps" and setting == "split.blocks":
        return "no gaps either"
    if mode.name == "all" and mode.solver in STORING and setting == "data.augment":
        return "records that are kept without corrections are of plain images"
    if f"{mode}" == "auxnet, uncorrected" and setting == "rounds.window" and value != "all":
        return "one sweep, and nothing recorded"
    if mode.name == "auto" and setting == "train.report_every":
        return ""  # how often the residual is looked at, too
    return LISTED.get(setting, "")


def others(setting, mode):
    """Values of a setting that a mode does not have."""
    current = _settled(mode)[setting]
    if setting == "solver.name":
        other = {"backprop": "ddg", "ddg": "features-replay", "auxnet": "penalty"}
        other["fdg"] = "local-updates"  # two blocks, corrected so often: DDG's delay is the same
        return [other.get(mode.solver, "ddg" if mode.solver in ALONE else "auxnet")]
    if setting == "model.shortcut" and mode.solver == "petra":
        return ["identity"]
    values = OTHERS.get(setting) or _generic(setting, current, mode)
    return [value for value in values if value != current]


def _generic(setting, current, mode):
    section, _, key = setting.partition(".")
    if section in ("solver", "correction"):
        cls: type = registry.solver_class(mode.solver) if section == "solver" else Backprop
        hint = get_type_hints(cls)[key]
    else:
        hint = get_type_hints(Config.model_fields[section].annotation)[key]
    choices = [x for h in (hint, *get_args(hint)) if get_origin(h) is Literal for x in get_args(h)]
    if choices:
        return choices
    if isinstance(current, bool) or bool in get_args(hint):
        return [not current]
    if isinstance(current, int):
        return [current + 1]
    assert current, f"say in OTHERS what to try of {setting}"
    return [current / 2]


@cache
def trained(mode):
    """The result of a mode as it is."""
    return train(_asked(mode))


def train(asked, keeps=False):
    """Train a tiny network; ValueError for what is refused."""
    with _stand_ins(), TemporaryDirectory() as folder:
        config = build.read(None, asked, None, False)
        loaded = build.load_data(config)
        trainer = build.trainer(config, loaded, Path(folder), False)
        trainer.out, trainer.quiet = Path(folder) if keeps else None, True
        trainer.fit(*loaded)
    tensors = trainer.blocks.model.state_dict().values()
    weights = torch.cat([tensor.double().flatten() for tensor in tensors])
    return Result(weights, tuple(trainer.blocks.cuts))


@contextmanager
def _stand_ins():
    """Tiny images, a second sampler; no compiler, no GPU, and no time in the costs."""
    with (
        patch.object(data, "load", _load),
        patch.dict(SAMPLERS, {"backwards": Backwards}),
        patch.object(torch.nn.Module, "compile"),
        patch.object(torch.cuda, "is_available", return_value=False),
        patch.object(costs, "operations", _operations),
        patch.object(partition, "measured_costs", _even),
        # or it would depend on what a few images show
        patch.object(EarlyStopping, "_better", lambda self, name, value: self.best is None),
    ):
        yield


_COUNTED: dict[tuple[str, torch.Size, bool], tuple[float, float]] = {}


def _even(model, chain, sample):
    return [costs.Cost(1.0, 2.0)] * len(chain)


_counting = costs.operations


def _operations(module, x, with_input):
    key = (repr(module), x.shape, with_input)
    if key not in _COUNTED:
        _COUNTED[key] = _counting(module, x, with_input)
    return _COUNTED[key]


class Backwards(Uniform):
    def choose(self, epoch, first, count):
        return super().choose(epoch, first, count).flip(0)


def _load(name, directory=None, limit=0):
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    images = torch.randint(0, 256, (48, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (48,), generator=generator)
    train = Dataset(images[:40], labels[:40], 4, (0.5,), (0.3,), Augmentation(pad=1, flip=True))
    return train.take(limit), replace(train, images=images[40:], labels=labels[40:])


def _asked(mode, **more):
    """What a user gives for a mode, and for one more setting."""
    kept = mode.settings
    if "solver.name" in more:
        kept = {key: value for key, value in kept.items() if not key.startswith("solver.")}
    return {**TINY, "solver.name": mode.solver, **kept, **more}


@cache
def _settled(mode):
    tree = build.read(None, _asked(mode), None, False).model_dump()
    return {f"{section}.{key}": v for section, table in tree.items() for key, v in table.items()}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_setting_acts_or_is_refused(mode):
    for setting in (s for s, m in triples() if m == mode and tried(s, m, SHARE)):
        outcome(setting, mode)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("solver", registry.OWN)
def test_every_setting_acts_or_is_refused_without_exception(solver):
    count(pair for pair in triples() if pair[1].solver == solver)


def count(pairs):
    """How many triples act, are refused or are listed; AssertionError names those that do not."""
    found, faults = Counter[str](), []
    for setting, mode in pairs:
        try:
            found[outcome(setting, mode)] += 1
        except AssertionError as error:
            faults.append(str(error))
    assert not faults, "\n".join(faults)
    return found


if __name__ == "__main__":
    found = count(triples())
    print(f"{found.total()} triples: {dict(found)}")
