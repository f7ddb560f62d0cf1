"""`--solver auto`: what a plan for these ranks says is fastest to an accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from hybrid.bench.measure import meet
from hybrid.links import Network
from hybrid.plan.advice import best, spoken
from hybrid.plan.planner import Planner, Say
from hybrid.ranks import launch
from hybrid.runs import build

AUTO = "auto"
OWN = ("solver", "correction", "rounds")
"""Sections that the choice settles."""
PROBE_BYTES = 2**21
IN_ONE_PROCESS = Network(bytes_per_second=5e9, latency_seconds=1e-6)
"""Threads hand tensors over without a copy; what counts is not in the way."""


def chosen(path: Path | None, overrides: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """`overrides` with the settings of the recipe that makes most progress a second here.

    Rank 0 measures units and plans; all must call it. ValueError for settings that it would choose.
    """
    given = {key: value for key, value in overrides.items() if key != "solver.name"}
    for key, value in given.items():
        if key.partition(".")[0] in OWN:
            raise ValueError(
                f"{key} is {value!r}, but --solver auto chooses it: leave it out, or name a solver"
            )
    settings = build.read(path, given, None, False)
    comm = launch.communicator()
    network = IN_ONE_PROCESS if comm is None else measured_network(comm)
    made: dict[str, Any] = {}
    if launch.launched_rank() == 0:
        count = settings.split.blocks
        images, _ = build.data_sets(settings.data)
        planner = Planner(settings, build.model(settings, images), images, network)
        say(f"auto: planning for {count} blocks, {network.bytes_per_second * 8e-9:.3g} Gb/s")
        parts = [m for m in (4, 8) if settings.train.batch_size >= 2 * m] or [1]
        found = planner.predictions([count], parts)
        recipe = best(found)
        say(f"auto: {spoken(found, {})}")
        made = {**recipe.recipe.settings(), "split.cuts": recipe.cuts}
        if recipe.gaps:
            made["rounds.gaps"] = [list(pair) for pair in recipe.gaps]
        if "split.cuts" in given or not recipe.cuts:
            del made["split.cuts"]
    if comm is not None:
        meet(comm)
        made = comm.bcast(made)
    return {**given, **made}


def measured_network(comm: Any) -> Network:
    """The slowest link of the chain: 2 MiB there and back, the best of five, every pair in turn."""
    rates: list[float] = []
    latencies: list[float] = []
    for k in range(comm.size - 1):
        pair = (k, k + 1)
        for size, found in ((PROBE_BYTES, rates), (1, latencies)):
            if comm.rank in pair:
                found.append(_there_and_back(comm, pair[1 - pair.index(comm.rank)], size) / 2)
        meet(comm)
    seconds = max(max(each, default=0.0) for each in comm.allgather(rates))
    latency = max(max(each, default=0.0) for each in comm.allgather(latencies))
    if not seconds:
        return IN_ONE_PROCESS
    return Network(PROBE_BYTES / max(seconds - latency, 1e-9), latency)


def _there_and_back(comm: Any, peer: int, size: int) -> float:
    buffer = np.zeros(size, dtype=np.uint8)
    taken = []
    for _ in range(5):
        start = perf_counter()
        first, second = (comm.Send, comm.Recv) if comm.rank < peer else (comm.Recv, comm.Send)
        first(buffer, peer)
        second(buffer, peer)
        taken.append(perf_counter() - start)
    return min(taken)
