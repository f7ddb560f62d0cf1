"""What a rank gets from the others between two mini-batches does not grow with their number."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import wraps
from typing import Any

import pytest
from trainings import digits, trained_weights, trainer

from hybrid.links.base import RankLinks
from hybrid.solvers import AugmentedLagrangian, Backprop
from hybrid.training.run import Run
from hybrid_samplers import SelectiveBackprop


@pytest.fixture
def arriving(monkeypatch) -> Counter[int]:
    """Bytes of the pickled values that each rank gets in its reports, and what they decide."""
    found, within = Counter[int](), set[int]()

    def counted(name: str) -> Any:
        call = getattr(RankLinks, name)

        @wraps(call)
        def counting(links: RankLinks, *values: Any, **at: Any) -> Any:
            given = call(links, *values, **at)
            if links.place.number in within and given is not None:
                found[links.place.number] += len(pickle.dumps(given))
            return given

        return counting

    def reporting(run: Run, *pairs: Any) -> Any:
        within.add(run.links.place.number)
        return run_rounds(run, *pairs)

    def summing_up(run: Run) -> Any:
        within.discard(run.links.place.number)
        return make_summary(run)

    run_rounds, make_summary = Run._run_rounds, Run._make_summary
    monkeypatch.setattr(Run, "_make_summary", summing_up)
    monkeypatch.setattr(Run, "_run_rounds", reporting)
    for name in ("everyone", "all_gather", "gather", "broadcast"):
        if hasattr(RankLinks, name):
            monkeypatch.setattr(RankLinks, name, counted(name))
    return found


@pytest.mark.parametrize(
    ("solver", "more"),
    [
        (Backprop(), {}),
        (Backprop(), {"sampler": SelectiveBackprop(lag=2)}),
        (AugmentedLagrangian(), {"window": 2}),
    ],
    ids=["backprop", "learned sampler", "sweeps"],
)
def test_a_report_costs_a_rank_as_much_among_four_as_among_sixteen(
    arriving, solver, more: dict[str, Any]
) -> None:
    costs = []
    for side in (2, 4):
        arriving.clear()
        made = trainer(solver, None, side, replicas=side, model="plain", **more)
        trained_weights(made, digits(2))
        # the first rank sees all shares, that of the first replica's last block all losses
        others = arriving.keys() - {0, side - 1}
        costs.append(max(arriving[number] for number in others))
    assert costs[1] <= 1.1 * costs[0]
