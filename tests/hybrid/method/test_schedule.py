"""The learning rate at chosen steps, and what holds at every step."""

from math import cos, inf, pi

import pytest
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st

from hybrid.method import schedule as schedules
from hybrid.method.schedule import Schedule
from hybrid.settings.config import ScheduleSettings

NAMES = ("cosine", "linear", "step", "constant")


def rates(name, steps_per_epoch=10, epochs=4, warmup=1.0, **settings):
    schedule = Schedule(
        ScheduleSettings(name=name, warmup_epochs=warmup, **settings), 0.5, steps_per_epoch, epochs
    )
    return [schedule(step) for step in range(steps_per_epoch * epochs)]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("cosine", lambda done: (1 + cos(pi * done)) / 2),
        ("linear", lambda done: 1 - done),
        ("step", lambda done: 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01),
        ("constant", lambda done: 1.0),
    ],
)
def test_the_rate_rises_in_equal_steps_to_the_peak_and_falls_by_its_shape(name, share):
    assert rates(name)[:10] == pytest.approx([0.05 * (i + 1) for i in range(10)])
    found = rates(name, warmup=0.0, milestones=[0.5, 0.75], gamma=0.1)
    assert found == pytest.approx([0.5 * share(step / 40) for step in range(40)])


@given(
    name=st.sampled_from(NAMES),
    steps_per_epoch=st.integers(1, 20),
    epochs=st.integers(1, 5),
    warmup=st.floats(0, 1e6),
)
def test_the_rate_is_positive_at_every_step_and_never_above_the_peak(
    name, steps_per_epoch, epochs, warmup
):
    found = rates(name, steps_per_epoch, epochs, warmup)
    assert all(0 < rate <= 0.5 for rate in found)
    top = found.index(max(found))
    assert found[:top] == sorted(found[:top])
    assert found[top:] == sorted(found[top:], reverse=True)


EPOCHS, STEPS = 6, 5


@pytest.mark.parametrize("rate", [-0.1, inf, float("nan"), None, "fast"])
def test_a_function_of_the_step_gives_finite_rates_that_are_not_negative(rate):
    found = schedules.make_schedule(lambda step: 0.1 / (1 + step), 0.3, STEPS, EPOCHS)
    assert found(3) == 0.1 / 4
    said = refusal(
        schedules.make_schedule, lambda step: rate if step == 7 else 0, 0.3, STEPS, EPOCHS
    )
    assert said.startswith(f"the schedule gives {rate!r} at step 7: ")
