"""Plans that are quick to make: of few methods, over units whose time is given."""

import pytest

from hybrid.bench.plan import timed_network
from hybrid.bench.plan.planner import Planner
from hybrid.settings import methods
from hybrid.solvers import DDG
from hybrid.solvers.local_work.budget import Cost


@pytest.fixture(autouse=True)
def quick_plans(request, monkeypatch):
    """The method that is asked for, and a delayed one; units are timed where time is measured."""

    def few(planner):
        asked = methods.solver(planner.settings)
        return [asked] if isinstance(asked, DDG) else [asked, DDG()]

    def given(model, chain, samples):
        return [[Cost(1e-3, 2e-3)] * len(chain) for _ in samples]

    monkeypatch.setattr(Planner, "solvers", few)
    if "timed_units" not in request.fixturenames:
        monkeypatch.setattr(timed_network, "measure_passes", given)


@pytest.fixture
def timed_units():
    """Of a test whose units are really timed."""
