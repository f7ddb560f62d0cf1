"""`--solver auto`: train by the fastest way to an accuracy that a plan for these ranks finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from hybrid.links import Network
from hybrid.links.communicator import Communicator
from hybrid.links.grid import Grid
from hybrid.method.settle import check_replicas
from hybrid.plan.advice import advice_to_stay, impossible_predictions, verdict
from hybrid.plan.planner import Planner
from hybrid.plan.prediction import best
from hybrid.plan.subject import Say
from hybrid.ranks import launch
from hybrid.ranks.starting import link_class
from hybrid.settings import methods
from hybrid.settings.config import Config, SplitSettings
from hybrid.settings.resolve import load, read_toml
from hybrid.settings.sections.base import is_reference
from hybrid.solvers import registry
from hybrid.solvers.registry import STRATEGIES
from hybrid.training import build

AUTO = "auto"
PROBE_BYTES = 2**21
IN_ONE_PROCESS = Network(bytes_per_second=5e9, latency_seconds=1e-6)
"""Threads hand tensors over without a copy."""


def asked(path: Path | None, overrides: Mapping[str, Any]) -> bool:
    """Whether the command line, or else the file, asks for it."""
    return _named(path, overrides) == AUTO


def stored(out: Path | None) -> dict[str, Any]:
    """The method that a resumed run chose before."""
    file = (out or Path()) / "config.toml"
    tree = read_toml(file, links=False) if out is not None and file.exists() else {}
    name = _table(tree, "solver").get("name")
    return {} if name is None else {"solver.name": name}


def settings(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """The settings to plan for; ValueError for settings that the plan chooses or cannot handle."""
    tree = read_toml(path) if path is not None else {}
    settled = {f"{s}.{k}": v for s in _CHOSEN for k, v in _table(tree, s).items()}
    settled |= {k: v for k, v in overrides.items() if k.partition(".")[0] in _CHOSEN}
    for key in settled.keys() - {"solver.name", "rounds.memory_gb"}:
        where = "" if key in overrides else f" in {path}"
        raise ValueError(
            f"{key} is {settled[key]!r}{where}, but --solver auto chooses it: leave it out, or "
            "name a solver"
        )
    found = build.read_settings(path, {**overrides, "solver.name": registry.DEFAULT}, None, False)
    # which is cut as a training would cut it
    own = is_reference(found.model.name)
    if found.split.balance != SplitSettings().balance and not own:
        raise ValueError(
            f"split.balance is {found.split.balance!r}, but --solver auto balances by measured "
            "time: leave it out, or give split.cuts"
        )
    if launch.device(found.train.device).type == "cuda":
        raise ValueError(
            "--solver auto times units on a CPU, and this run's device is a GPU: name a solver, or "
            "--set train.device=cpu"
        )
    ranks = found.split.blocks * found.split.replicas
    threads = 1 if link_class(found.links).clocked else launch.threads_per_rank(ranks)
    found.train = found.train.model_copy(update={"threads": found.train.threads or threads})
    asked = load(path, {**overrides, "solver.name": registry.DEFAULT}).split
    if not (asked.blocks or asked.cuts or asked.replicas):
        # the grid is chosen, too: as many ranks, of which none has a place yet
        found.split = found.split.model_copy(update={"blocks": ranks, "replicas": 0})
    return found


def network(found: Config) -> Network:
    """What joins the ranks; all must call it."""
    if link_class(found.links).clocked:
        return Network.asked(found.links)
    comm = launch.communicator()
    return IN_ONE_PROCESS if comm is None else measured_network(comm)


def chosen(found: Config, joined: Network, say: Say) -> dict[str, Any]:
    """The settings of the recipe that makes most progress a second, "section.key" -> value."""
    data, _ = build.load_data_sets(found.data)
    planner = Planner(found, build.build_network(found, data), data, joined)
    wanted, size = _grids(found, planner), found.train.batch_size
    there = f"{wanted[0]}" if len(wanted) == 1 else f"{wanted[0].ranks} ranks"
    say(f"auto: planning for {there} and {joined.bytes_per_second * 8e-9:.3g} Gb/s")
    micro_batches = [m for m in (2, 4, 8) if size >= 2 * m] or [1]
    predictions = planner.predictions(wanted, micro_batches, found.split.cuts)
    sync, default = methods.sync(found), STRATEGIES[STRATEGIES.default]()
    if sync != default:
        predictions = [p for p in predictions if p.recipe.sync == sync]
    if not predictions:
        raise ValueError(planner.refused[0])
    taken, alone = best(predictions), planner.on_one_rank(micro_batches)[0]
    say(f"auto: {verdict(predictions, {})}")
    if stay := advice_to_stay(predictions, alone):
        free = joined is IN_ONE_PROCESS and len(wanted) > 1 and sync == default
        say(f"auto: {stay}" + ("" if free else ": hybrid train --blocks 1, without mpirun"))
        taken = alone if free else taken
    for doubt in (*planner.doubts, *impossible_predictions([taken])):
        say(f"auto: {doubt}")
    made = {**taken.recipe.settings(), "split.cuts": taken.cuts}
    made |= {"split.blocks": taken.blocks, "split.replicas": taken.replicas}
    return made


def _grids(found: Config, planner: Planner) -> list[Grid]:
    """Those to choose from: the one that is asked for, or what may train all the ranks there are.

    A replica has two samples at least, or there would be nothing to normalize by; what is asked of
    replicas, such as a strategy, is not left without any.
    """
    asked = found.split
    if asked.replicas:
        return [Grid(asked.blocks, asked.replicas)]
    every = planner.grids(asked.blocks)
    some = [grid for grid in every if 2 * grid.replicas <= planner.size]
    try:
        check_replicas(build.build_options(found))
    except ValueError:
        some = [grid for grid in some if grid.replicas > 1]
    return some or every


def measured_network(comm: Communicator) -> Network:
    """The slowest link of the chain: 2 MiB there and back, the best of five, every pair in turn."""
    rates: list[float] = []
    latencies: list[float] = []
    for k in range(comm.size - 1):
        pair = (k, k + 1)
        for size, taken in ((PROBE_BYTES, rates), (1, latencies)):
            if comm.rank in pair:
                taken.append(_there_and_back(comm, pair[1 - pair.index(comm.rank)], size) / 2)
        comm.barrier()
    seconds = max(max(each, default=0.0) for each in comm.allgather(rates))
    latency = max(max(each, default=0.0) for each in comm.allgather(latencies))
    if not seconds:
        return IN_ONE_PROCESS
    return Network(PROBE_BYTES / max(seconds - latency, 1e-9), latency)


def _there_and_back(comm: Communicator, peer: int, size: int) -> float:
    buffer = np.zeros(size, dtype=np.uint8)
    taken = []
    for _ in range(5):
        start = perf_counter()
        first, second = (comm.send, comm.receive)
        for move in (first, second) if comm.rank < peer else (second, first):
            move(buffer, peer)
        taken.append(perf_counter() - start)
    return min(taken)


_CHOSEN = ("solver", "correction", "rounds")
"""Sections that the choice settles."""


def _named(path: Path | None, overrides: Mapping[str, Any]) -> object:
    tree = read_toml(path) if path is not None else {}
    return overrides.get("solver.name", _table(tree, "solver").get("name"))


def _table(tree: Mapping[str, Any], section: str) -> dict[str, Any]:
    table = tree.get(section, {})
    return table if isinstance(table, dict) else {}
