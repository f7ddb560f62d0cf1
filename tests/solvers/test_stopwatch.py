"""Pieces of work are timed by the clock of the phase they are in, or by a GPU's events."""

from types import SimpleNamespace

import pytest
import torch

from hybrid.solvers.windows import Stopwatch


def test_on_a_gpu_nothing_waits_for_it_before_the_time_is_asked_for(monkeypatch):
    waited = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, other):
            return 250.0  # milliseconds

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_initialized=lambda: True, Event=Event))
    wall = SimpleNamespace(
        clocked=False, now=lambda: pytest.fail("the host's clock says nothing of a GPU")
    )
    watch = Stopwatch()
    for _ in range(2):
        with watch.timing(wall):
            pass
    assert not waited
    assert watch.seconds() == 0.5
    assert len(waited) == 2
    with watch.timing(SimpleNamespace(clocked=True, now=iter([1.0, 4.0]).__next__)):
        pass  # the virtual clock counts work, on a GPU, too
    assert watch.seconds() == 3.5
