"""A setting that a user gives acts, or is refused with the reason: over all settings, all modes.

A triple is (setting, solver, mode). `make test` tries every setting with one of the solvers, and
every solver with some of the settings; `make test-slow` tries all triples.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count as count_up
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from setting_modes import LISTED, MODES, OTHERS, TINY
from torch import Tensor

from hybrid import data
from hybrid.data import Augmentation, Dataset
from hybrid.data.samplers import SAMPLERS, Uniform
from hybrid.data.samplers.uniform import Permutations
from hybrid.networks import costs, partition
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED, known_settings
from hybrid.settings.selection import Selection
from hybrid.solvers import registry
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.training import build


class Result(NamedTuple):
    weights: Tensor
    cuts: tuple[str, ...]


def triples():
    """Every setting in every mode."""
    return [(setting, mode) for mode in MODES for setting in known(mode)]


@cache
def known(mode):
    """The settings that a mode has."""
    return known_settings(mode.solver, names(mode))


def names(mode):
    """What the sections are of whose settings depend on it, where a mode says so."""
    asked = {section: mode.settings.get(f"{section}.name") for section in NAMED}
    return {section: name for section, name in asked.items() if name}


@cache
def sample():
    """Every setting once, spread evenly over the solvers.

    Most triples of a solver share one mode, since each mode is also trained as it is.
    """
    chosen, number = [], Counter[str]()
    for setting in sorted({setting for setting, _ in triples()}):
        having = [mode for mode in MODES if setting in known(mode)]
        mode = min(having, key=lambda mode: number[mode.solver])
        chosen.append((setting, mode))
        number[mode.solver] += 1
    return chosen


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
        # threads add in another order, and step in one
        assert same or setting in ("train.threads", "solver.any_order"), (
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
    shown = f"{setting}={value}"
    if shown in mode.same:
        return mode.same[shown]
    if setting in mode.same:
        return mode.same[setting]
    return LISTED.get(setting, "")


def others(setting, mode):
    """Values of a setting that a mode does not have."""
    current = _settled(mode)[setting]
    if setting == "solver.name" and setting not in mode.tries:
        return ["auxnet" if registry.solver_class(mode.solver).alternates else "ddg"]
    values = mode.tries.get(setting) or OTHERS.get(setting) or _generic(setting, current, mode)
    return [value for value in values if value != current]


def _generic(setting, current, mode):
    section, _, key = setting.partition(".")
    if section in ("solver", "correction", *NAMED):
        made = {each: of[names(mode).get(each, of.default)] for each, of in NAMED.items()}
        made |= {"solver": registry.solver_class(mode.solver), "correction": PassSettings}
        hint = get_type_hints(made[section])[key]
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
        config = build.read_settings(None, asked, None, False)
        loaded = build.load_rank_data(config)
        trainer = build.build_trainer(config, loaded, Path(folder), False)
        trainer.options.out, trainer.options.quiet = Path(folder) if keeps else None, True
        trainer.fit(loaded.train, loaded.test, validation=loaded.validation)
    tensors = trainer.blocks.model.state_dict().values()
    weights = torch.cat([tensor.double().flatten() for tensor in tensors])
    return Result(weights, tuple(trainer.blocks.cuts))


@contextmanager
def _stand_ins():
    """Tiny images, a second sampler; no compiler, no GPU, and no time in the costs.

    The first epoch is the best.
    """
    calls = count_up()
    with (
        patch.object(data, "load", _load),
        patch.dict(SAMPLERS.places, {"backwards": f"{__name__}:Backwards"}),
        patch.object(torch.nn.Module, "compile"),
        patch.object(torch.cuda, "is_available", return_value=False),
        patch.object(costs, "count_operations", _operations),
        patch.object(partition, "measure_costs", _even),
        # or it would depend on what a few images show
        patch.object(Selection, "score", lambda self, results: -next(calls)),
    ):
        yield


_COUNTED: dict[tuple[str, torch.Size, bool], tuple[list[costs.Moved], list[costs.Moved]]] = {}


def _even(model, chain, sample):
    return [costs.Cost(1.0, 2.0)] * len(chain)


_counting = costs.count_operations


def _operations(module, x, with_input):
    key = (repr(module), x.shape, with_input)
    if key not in _COUNTED:
        _COUNTED[key] = _counting(module, x, with_input)
    return _COUNTED[key]


@dataclass(frozen=True)
class Backwards(Uniform):
    name: ClassVar[str] = "backwards"

    def start(self, data, seed):
        choice = super().start(data, seed)
        choice.choose = lambda *asked: Permutations.choose(choice, *asked).flip(0)
        return choice


def _load(name, directory=None, limit=0):
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    images = torch.randint(0, 256, (64, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (64,), generator=generator)
    train = Dataset(images[:48], labels[:48], 4, (0.5,), (0.3,), Augmentation(pad=1, flip=True))
    return train.take(limit), replace(train, images=images[48:], labels=labels[48:])


def _asked(mode, **more):
    """What a user gives for a mode, and for one more setting."""
    kept = mode.settings
    if "solver.name" in more:
        kept = {key: value for key, value in kept.items() if not key.startswith("solver.")}
    for section in NAMED:
        if f"{section}.name" in more:
            kept = {key: value for key, value in kept.items() if not key.startswith(f"{section}.")}
    return {**TINY, "solver.name": mode.solver, **kept, **more}


@cache
def _settled(mode):
    tree = build.read_settings(None, _asked(mode), None, False).model_dump()
    return {f"{section}.{key}": v for section, table in tree.items() for key, v in table.items()}


@pytest.mark.parametrize("solver", registry.OWN)
def test_every_solver_has_modes(solver):
    declared = [mode.name for mode in MODES if mode.solver == solver]
    assert declared, f"give tests/support/methods/setting_modes.py modes of {solver}"
    assert len(set(declared)) == len(declared)


@pytest.mark.parametrize(("section", "name"), [(s, n) for s in NAMED for n in NAMED[s].places])
def test_every_strategy_and_sampler_has_a_mode(section, name):
    chosen = {mode.settings.get(f"{section}.name", NAMED[section].default) for mode in MODES}
    assert name in chosen, f"give setting_modes.py a mode with {section}.name={name}"


def test_every_setting_and_every_solver_are_in_the_sample():
    assert {setting for setting, _ in sample()} == {setting for setting, _ in triples()}
    assert {mode.solver for _, mode in sample()} == set(registry.OWN)


@pytest.mark.parametrize("solver", registry.OWN)
def test_every_setting_acts_or_is_refused(solver):
    """All of a solver's own, and half of those that several share; the slow test has all."""
    shared = [pair for pair in sample() if not pair[0].startswith("solver.")]
    some = {setting for setting, _ in shared[::2]}
    own = [pair for pair in sample() if pair[1].solver == solver]
    count(pair for pair in own if pair[0] in some or pair[0].startswith("solver."))


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
