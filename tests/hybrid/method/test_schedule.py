"""The learning rate at chosen steps, and what holds at every step."""

from math import cos, inf, pi

import pytest
import torch
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from hybrid.method import schedule as schedules
from hybrid.method.schedule import Schedule
from hybrid.settings.config import ScheduleSettings
from hybrid.solvers.acting import Facts, check

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
TORCH = [
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2}, "epoch"),
    ("MultiStepLR", {"milestones": [2, 4], "gamma": 0.5}, "epoch"),
    ("OneCycleLR", {"three_phase": True}, "epoch"),
    ("OneCycleLR", {"epochs": EPOCHS, "steps_per_epoch": STEPS}, "step"),
    ("CyclicLR", {"base_lr": 0.01, "step_size_up": 4, "mode": "triangular2"}, "step"),
]
BY_STEP = ("OneCycleLR", "CyclicLR")


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_schedule_of_torch_has_equal_parts_of_its_rates_while_it_warms_up(interval):
    settings = {"name": "ExponentialLR", "arguments": {"gamma": 0.9}, "interval": interval}
    cold, warm = (
        schedules.make_schedule(ScheduleSettings(**settings, **more), 0.3, STEPS, EPOCHS)
        for more in ({}, {"warmup_epochs": 1.6})
    )
    shares = [min(1.0, (step + 1) / 8) for step in range(STEPS * EPOCHS)]  # of 1.6 epochs of 5
    expected = [share * cold(step) for step, share in enumerate(shares)]
    assert [warm(step) for step in range(STEPS * EPOCHS)] == pytest.approx(expected)


@pytest.mark.parametrize(("name", "arguments", "interval"), TORCH)
def test_a_schedule_of_torch_has_the_rates_of_a_plain_loop(name, arguments, interval):
    settings = ScheduleSettings(name=name.lower(), arguments=arguments, interval=interval)
    found = schedules.make_schedule(settings, 0.3, STEPS, EPOCHS)
    own = {"max_lr": 0.3, "cycle_momentum": False} if name in BY_STEP else {}
    if name == "OneCycleLR" and "epochs" not in arguments:
        own["total_steps"] = EPOCHS * (STEPS if interval == "step" else 1)
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = getattr(lr_scheduler, name)(sgd, **arguments, **own)
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            assert found(epoch * STEPS + step) == sgd.param_groups[0]["lr"]
            sgd.step()
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()


def test_the_interval_is_torchs_usual_one_unless_asked_for():
    for name, arguments, by_step in (
        ("one-cycle", {}, True),
        ("ExponentialLR", {"gamma": 0.9}, False),
    ):
        settings = ScheduleSettings(name=name, arguments=arguments)
        found = schedules.make_schedule(settings, 0.3, STEPS, EPOCHS)
        assert (found(0) != found(1)) == by_step


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("StepLR", {}, "torch says: StepLR.__init__() missing 1 required positional argument"),
        ("OneCycleLR", {"total_steps": 3}, "Tried to step 4 times"),
        ("CyclicLR", {"base_lr": -1.0}, "the schedule gives -1.0 at step 0 (schedule.name is"),
        ("ExponentialLR", {"gamma": 1e300}, "inf at step 10 (schedule.name is 'ExponentialLR'"),
    ],
)
def test_arguments_that_give_no_rates_are_one_line(name, arguments, said):
    settings = ScheduleSettings(name=name, arguments=arguments)
    message = refusal(schedules.make_schedule, settings, 0.3, STEPS, EPOCHS)
    assert said in message
    assert "schedule.arguments" in message


@pytest.mark.parametrize("rate", [-0.1, inf, "fast"])
def test_a_function_of_the_step_gives_finite_rates_that_are_not_negative(rate):
    found = schedules.make_schedule(lambda step: 0.1 / (1 + step), 0.3, STEPS, EPOCHS)
    assert found(3) == 0.1 / 4
    said = refusal(
        schedules.make_schedule, lambda step: rate if step == 7 else 0, 0.3, STEPS, EPOCHS
    )
    assert said.startswith(f"the schedule gives {rate!r} at step 7: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "cosine", "interval": "step"}, "schedule.interval is 'step'"),
        ({"name": "one-cycle", "metric": "accuracy"}, "schedule.metric is 'accuracy'"),
        ({"name": "one-cycle", "gamma": 0.5}, "schedule.gamma is 0.5"),
    ],
)
def test_a_setting_that_a_schedule_does_not_read_is_refused(given, said):
    settings = ScheduleSettings(**given)
    assert said in refusal(check, {"schedule": settings}, Facts(schedule=settings))
