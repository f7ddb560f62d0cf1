"""A planner that knows the times of its units, so that it measures nothing."""

from itertools import pairwise

from hybrid.bench.plan import planner as plan
from hybrid.links import LinkSpeed
from hybrid.networks.units import units
from hybrid.settings.resolve import load
from hybrid.solvers.local_work.budget import Cost
from hybrid.training import build

FORWARD, BACKWARD = 0.01, 0.02
"""Of a sample and a unit, so long that what else a rank does is nothing beside it."""


def planner(network=None, limit=256, faster=(), **settings):
    """`faster`: numbers of samples of which a pass takes half of that."""
    given = {"model.name": "resnet8", "data.name": "digits", "data.limit": limit, **settings}
    given |= {"split.balance": "even", "split.inside": False}
    resolved = load({}, {**given, "train.batch_size": 32, "train.report_every": 1000})
    images, _ = build.load_data_sets(resolved.data)
    made = plan.Planner(
        resolved, build.build_model(resolved, images), images, network or LinkSpeed(1e12)
    )
    places = {unit.name: place for place, unit in enumerate(units(made.model))}

    def measure(blocks, *sizes):
        """A block's time is that of its units."""
        names = tuple(unit.name for unit in blocks.units)
        counts = [b - a for a, b in pairwise([*map(places.get, names), len(places)])]
        made.timed.times[names] = {
            size: [Cost(FORWARD * n * share, BACKWARD * n * share) for n in counts]
            for size in (1, 2, 4, 8, 16, 32)
            for share in [0.5 if size in faster else 1.0]
        }

    made.timed.measure = measure
    return made
