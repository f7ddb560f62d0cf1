"""Metrics that accumulate: one rank shows them what all replicas have seen, as if it were one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from hybrid.links import RankLinks
from hybrid.solvers.blocks.metrics import Accumulating, evaluated, reset
from hybrid.solvers.blocks.objective import Objective
from hybrid.solvers.windows import Seen


class Scores:
    """Some of an objective's metrics over one evaluation, on the last blocks of all replicas.

    Outputs and targets go to the first replica, which alone computes.
    """

    def __init__(self, links: RankLinks, objective: Objective, names: Iterable[str]) -> None:
        self._links, self._objective = links, objective
        self._metrics: Mapping[str, Accumulating] = {n: objective.accumulated[n] for n in names}
        self._computes = links.place.number == links.size - 1
        if self._computes:
            for name, metric in self._metrics.items():
                reset(name, metric)

    def add(self, seen: Seen | None) -> None:
        """Take in a batch of every replica, in their order; None: this one has none.

        All of them call it as often, if there is any metric.
        """
        if self._metrics:
            self._objective.accumulate(self._metrics, self._everyones(seen))

    def values(self) -> dict[str, float]:
        """What the metrics found, on the rank that computes; elsewhere nothing."""
        if not self._computes:
            return {}
        found = {name: evaluated(name, metric) for name, metric in self._metrics.items()}
        for name, metric in self._metrics.items():
            reset(name, metric)  # what it holds is no longer wanted
        return found

    def _everyones(self, seen: Seen | None) -> Iterator[Seen]:
        links, replicas = self._links, range(self._links.place.replicas)
        if len(replicas) == 1:
            if seen is not None:
                yield seen
            return
        nothing = torch.empty(0)
        mine = seen or (nothing,) * (self._objective.output.num_leaves + 1)
        exchanges = [
            links.peers.exchange([tensor if r == 0 else nothing for r in replicas])
            for tensor in mine
        ]
        arrived = [exchange() for exchange in exchanges]
        if self._computes:
            yield from (theirs for theirs in zip(*arrived, strict=True) if len(theirs[-1]))


def accuracies_in_training(
    links: RankLinks, objective: Objective, phases: Sequence[list[Seen]]
) -> list[float | None]:
    """The accuracy of each phase, from what was seen in it; all ranks call it, and have the same.

    None where nothing was.
    """
    found: list[float | None] = []
    for seen in phases if links.rank == links.size - 1 else ():
        scores = Scores(links, objective, ["accuracy"])
        scores.add(tuple(map(torch.cat, zip(*seen, strict=True))) if seen else None)
        found.append(scores.values().get("accuracy") if seen else None)
    return links.broadcast(found, at=links.size - 1)
