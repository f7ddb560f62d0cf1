"""The schedule that `hybrid show --schedule` prints."""

from collections.abc import Mapping
from typing import Any

from hybrid.settings import methods
from hybrid.settings.resolve import load
from hybrid.solvers import Solver
from hybrid.solvers.engine.engine import Scheduled
from hybrid.solvers.engine.schedule import Span, table
from hybrid.solvers.local_work.budget import LocalBudget

BATCHES = 2
"""Mini-batches whose schedule is shown, from an empty pipeline to an empty one."""
LEGEND = "F: forward pass, B: backward pass, L: local work, *: a step follows, .: idle"


def schedule_text(overrides: Mapping[str, Any]) -> str:
    """Draw the schedule of each block for two mini-batches, in slots of one pass each.

    `overrides`: "section.key" -> value. No network is built: a schedule depends on the number of
    blocks.

    A training executes the same lists. ValueError for a method without a schedule of passes, and,
    with the table, for a schedule that would deadlock.
    """
    settings = load(None, {"split.blocks": 2, **overrides})
    count = len(settings.split.cuts) + 1 if settings.split.cuts else settings.split.blocks
    solver = methods.solver(settings)
    size = settings.train.batch_size // (settings.split.replicas or 1)
    m = solver.num_micro_batches(size, count)
    span, pairs = Span.of([m] * BATCHES), settings.rounds.local_budget or [(0, 0)] * count
    if settings.rounds.local_budget and not isinstance(methods.named(settings, "fill"), Solver):
        raise ValueError(
            "rounds.local_budget has an effect only with a method for local work: fill.name"
        )
    if len(pairs) != count:
        raise ValueError(
            f"rounds.local_budget has {len(pairs)} pairs for {count} blocks: give one a block"
        )
    schedules = []
    if isinstance(solver, Scheduled):
        budgets = [LocalBudget(*pair) for pair in pairs]
        schedules = [solver.schedule(k, count, span, each) for k, each in enumerate(budgets)]
    if not any(schedules):
        raise ValueError(
            f"solver.name is {solver.name!r}, which has no schedule of passes through whole "
            "blocks: leave --schedule out, or choose another solver"
        )
    title = f"{solver.name}: {BATCHES} mini-batches of {size} samples, in {m} micro-batches each"
    return "\n".join([title, LEGEND, "", table(schedules)])
