"""Plans that are quick to make: of few methods, over units that are timed a few times."""

from functools import partial

import pytest

from hybrid.cuts.costs import measured_passes
from hybrid.plan import subject
from hybrid.plan.planner import Planner
from hybrid.settings import methods
from solvers import DDG


@pytest.fixture(autouse=True)
def quick_plans(request, monkeypatch):
    """The method that is asked for and a delayed one; 4 passes over the units, not 10."""
    monkeypatch.setattr(subject, "measured_passes", partial(measured_passes, budget=0))
    if "every_method" not in request.fixturenames:
        monkeypatch.setattr(
            Planner, "solvers", lambda planner: [methods.solver(planner.settings), DDG()]
        )


@pytest.fixture
def every_method():
    """A test that takes this plans for all methods that may be advised."""
