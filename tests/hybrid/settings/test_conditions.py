"""What is declared beside a setting decides whether it is refused, and what is said of it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest
from trainings import digits

from hybrid import Trainer, split
from hybrid.method.make_method import facts_of, sections
from hybrid.networks import models
from hybrid.settings.config import Config
from hybrid.settings.methods import conditions
from hybrid.solvers import acting, registry
from hybrid.solvers.acting import Acts, Count, Facts, Needs, Positive, Settings


@dataclass(frozen=True)
class Base(Settings):
    """As another package may have it."""

    name: ClassVar[str] = "own"
    needs: ClassVar = (Needs("it runs alone", lambda run: run.ranks == 1, "wait"),)

    size: Count = 1
    mode: Annotated[
        Literal["a", "b"], Acts("size is above 1", lambda run: run.settings.size > 1)
    ] = "a"
    rate: Positive | None = None


@dataclass(frozen=True)
class Derived(Base):
    acts: ClassVar = {
        "own.rate": Acts("there is a test", lambda run: run.tested, here=lambda run: "none"),
        "other.*": Acts("never", lambda run: False),
    }


@dataclass(frozen=True)
class Misspelled(Settings):
    size: Annotated[int, Acts("there are replicas", lambda run: run.replcas > 1)] = 1


def refused(settings, section="own", **facts):
    """What is said of settings; empty if nothing is."""
    try:
        acting.check({section: settings}, Facts(**facts))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Base(), ""),
        (
            Base(mode="b"),
            "own.mode is 'b', which has an effect only where size is above 1: leave it out",
        ),
        (Base(size=2, mode="b", rate=1.0), ""),
        (
            Derived(rate=1.0),
            "own.rate is 1.0, which has an effect only where there is a test, and here none: "
            "leave it out",
        ),
    ],
    ids=repr,
)
def test_a_setting_without_an_effect_is_refused(settings, said):
    assert refused(settings, ranks=1, tested=False) == said


def test_a_class_that_cannot_work_is_refused_whatever_its_settings_are():
    said = "own.name is 'own', which works only where it runs alone: wait"
    assert refused(Derived(), ranks=2) == said


def test_conditions_of_a_section_hold_there_alone():
    assert refused(Derived(rate=1.0), ranks=1, tested=True) == ""
    assert "only where never" in refused(Derived(rate=1.0), "other", ranks=1, tested=True)


def test_what_is_not_known_yet_is_left_for_later():
    assert refused(Derived(rate=1.0)) == ""


def test_a_misspelled_fact_is_an_error():
    with pytest.raises(AttributeError, match="'Facts' object has no attribute 'replcas'"):
        acting.check({"own": Misspelled(size=2)}, Facts())
    with pytest.raises(TypeError, match="'replcas'"):
        Facts(replcas=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"size": 0}, "size is 0; it must be at least 1"),
        ({"mode": "c"}, "mode is 'c'; choose one of a, b"),
        ({"rate": -1.0}, "rate is -1.0; it must be positive"),
        ({"rate": 1e16}, "rate is 1e+16; it must be at most 1e+15"),
        ({"rate": 1e-31}, "rate is 1e-31; it must be at least 1e-30"),
        ({"rate": float("nan")}, "rate is nan; it must be positive"),
    ],
)
def test_values_are_those_that_their_types_allow(wrong, said):
    with pytest.raises(ValueError, match=r"it must|choose") as caught:
        Base(**wrong)
    assert str(caught.value) == said


def test_what_is_declared_is_what_is_explained():
    said = "It has an effect only where multipliers move (several sweeps, or window 'all')."
    assert conditions("solver", "lam_move", "augmented-lagrangian") == said
    assert conditions("train", "seed") == conditions("solver", "name") == ""
    compiled = conditions("train", "compile")
    assert compiled.count("It has an effect only where") == 1
    assert compiled.count("It works only where") == 1


@pytest.mark.parametrize("name", registry.names())
def test_every_condition_can_be_asked_of_a_run(name):
    """A misspelled fact would be an error at the user, and only where the setting is given."""
    cut = split(models.build("resnet8", 10, 1, 8), 2, balance="even")
    method = Trainer(cut, name, train={"batch_size": 16}).make_method(digits(1)[0])
    config = Config()
    facts = facts_of(method).copy_with(
        model=config.model, data=config.data, own_data=False, tested=True, link_settings=frozenset()
    )
    for section, table in {**vars(config), **sections(method)}.items():
        cls = type(table)
        for key in acting.declared(cls) if not isinstance(table, dict) else ():
            for condition in acting.conditions(cls, section, key):
                bool(condition.holds(facts.copy_with(settings=table)))
    assert all(need.holds(facts) for need in acting.needs(type(method.solver)))
