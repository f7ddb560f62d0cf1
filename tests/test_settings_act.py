"""A setting that a user gives acts, or is refused with the reason: over all settings, all modes.

`make test` tries every setting with one of the solvers; `make test-slow` tries all settings in all
modes.
"""

from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
from setting_modes import ELSEWHERE, FOLLOWED, LISTED, MODES, OTHERS, TINY
from torch import Tensor

from hybrid.rounds.phase_report import DivergedError
from hybrid.settings import methods
from hybrid.settings.methods import NAMED
from hybrid.solvers import registry
from hybrid.training import build, run_settings


class Result(NamedTuple):
    weights: Tensor
    cuts: tuple[str, ...]


@cache
def settings_of(mode):
    """The settings that a mode has."""
    names = {
        section: mode.settings.get(f"{section}.name", NAMED[section].default) for section in NAMED
    }
    return methods.known_settings(mode.solver, names)


@cache
def sample():
    """Every setting in one mode, spread evenly over the solvers."""
    pairs, number = [], Counter[str]()
    for setting in sorted({setting for mode in MODES for setting in settings_of(mode)}):
        having = [mode for mode in MODES if setting in settings_of(mode)]
        mode = min(having, key=lambda mode: number[mode.solver])
        pairs.append((setting, mode))
        number[mode.solver] += 1
    return pairs


@cache
def trained(mode):
    """The result of a mode as it is."""
    return train(asked(mode))


def asked(mode, **more):
    """What a user gives for a mode, and for one more setting."""
    renamed = tuple(f"{key.partition('.')[0]}." for key in more if key.endswith(".name"))
    kept = {k: v for k, v in mode.settings.items() if not (renamed and k.startswith(renamed))}
    return {**TINY, "solver.name": mode.solver, **kept, **more}


def train(given):
    """Train a tiny network; ValueError for what is refused."""
    with TemporaryDirectory() as folder:
        config = run_settings.read_settings(None, given)
        loaded = build.load_rank_data(config)
        trainer = build.build_trainer(config, loaded, Path(folder), False)
        trainer.options.quiet = True
        trainer.fit(loaded.train, loaded.test, validation=loaded.validation)
    tensors = trainer.blocks.model.state_dict().values()
    weights = torch.cat([tensor.double().flatten() for tensor in tensors])
    return Result(weights, tuple(trainer.blocks.cuts))


def others(setting, mode):
    """Settings by which one differs from what a mode has."""
    section, _, key = setting.partition(".")
    settings = run_settings.read_settings(None, asked(mode))
    config = {**settings.model_dump(), "rounds": vars(build.build_options(settings).rounds)}
    current = config[section][key]
    values = mode.tries.get(setting) or OTHERS.get(setting) or OTHERS.get(key)
    values = values or by_type(section, key, current, config)
    ways = [v if isinstance(v, dict) and setting in v else {setting: v} for v in values]
    return [way for way in ways if way[setting] != current]


def by_type(section, key, current, config):
    """The other choices of a setting, or a number beside its value."""
    cls = methods.declaring(section, config[section].get("name", ""))
    hint = get_type_hints(cls)[key]
    choices = [x for h in (hint, *get_args(hint)) if get_origin(h) is Literal for x in get_args(h)]
    if choices:
        return choices
    if isinstance(current, bool) or bool in get_args(hint):
        return [not current]
    if isinstance(current, int):
        return [current + 1]
    assert current, f"say in OTHERS what to try of {section}.{key}"
    return [current / 2]


def fault(setting, way, mode):
    """Why a setting neither acts nor is refused with a reason that names it; empty if it does."""
    what, base = f"{mode}: {way}", trained(mode)
    try:
        result = train(asked(mode, **way))
    except DivergedError:
        return ""
    except ValueError as error:
        named = [key.split(".")[1] for key in (*way, *mode.settings)]
        return "" if any(key in str(error) for key in named) else f"{what} is refused for {error}"
    reasons = {**LISTED, **mode.same}
    listed = reasons.get(f"{setting}={way[setting]}", reasons.get(setting, ""))
    if setting in FOLLOWED and result.cuts == base.cuts:
        listed = "the cuts come out the same"
    same = torch.equal(result.weights, base.weights)
    if bool(listed) == same:
        return ""
    return f"{what} changes nothing" if same else f"{what} changes the result ({listed})"


def faults(pairs):
    return [
        text
        for setting, mode in pairs
        for way in (others(setting, mode) if setting not in ELSEWHERE else ())
        if (text := fault(setting, way, mode))
    ]


@pytest.mark.parametrize("solver", registry.OWN)
def test_every_solver_has_modes(solver):
    names = [mode.name for mode in MODES if mode.solver == solver]
    assert names, f"give tests/support/methods/setting_modes.py modes of {solver}"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("section", "name"), [(s, n) for s in NAMED for n in NAMED[s].places])
def test_every_strategy_and_sampler_has_a_mode(section, name):
    chosen = {mode.settings.get(f"{section}.name", NAMED[section].default) for mode in MODES}
    assert name in chosen, f"give setting_modes.py a mode with {section}.name={name}"


def test_every_setting_and_every_solver_are_in_the_sample():
    assert {setting for setting, _ in sample()} == {s for mode in MODES for s in settings_of(mode)}
    assert {mode.solver for _, mode in sample()} == set(registry.OWN)


@pytest.mark.parametrize("solver", registry.OWN)
def test_every_setting_acts_or_is_refused(solver):
    pairs = [pair for pair in sample() if pair[1].solver == solver]
    assert not faults(pairs)
    assert not [pair for pair in pairs if not others(*pair)], "say in OTHERS what to try"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("solver", registry.OWN)
def test_every_setting_acts_or_is_refused_in_every_mode(solver):
    modes = [mode for mode in MODES if mode.solver == solver]
    assert not faults((setting, mode) for mode in modes for setting in settings_of(mode))
