"""The machines that blocks run on, as split.speeds and split.memory have them, or measured."""

import os
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn

from hybrid.errors import counted, tell
from hybrid.links.grid import Arrangement, Grid
from hybrid.ranks import launch
from hybrid.settings.config import Config, SplitSettings
from hybrid.solvers.acting import fault_of

NAMES = ("speeds", "memory")
MEASURED = "measured"
PASSES, WIDTH, ROWS = 9, 1024, 256
"""Of the passes that each rank times: through four layers of this width."""


class Machine(NamedTuple):
    """What a rank has measured of its machine."""

    speed: float
    """Passes a second."""
    memory: dict[tuple[str, str], int]
    """Bytes available to all ranks together that have the same key: a host and what limits it."""


def check_machines(split: SplitSettings) -> None:
    """ValueError unless each of the blocks has a number; it may be measured later."""
    for name in NAMES:
        numbers = getattr(split, name)
        if numbers != MEASURED and (fault := fault_of(numbers, split.blocks)):
            raise ValueError(f"split.{name} is {numbers}; {fault}")
        if numbers == MEASURED and split.replicas > 1 and split.side_by_side == "auto":
            raise ValueError(
                f"split.{name} is measured, and which ranks have a block is not settled before the "
                "cut: give split.side_by_side=chain or peers"
            )


def refuse_two_ways(split: SplitSettings, chosen: set[str]) -> None:
    """Reject cuts beside what cuts follow; `chosen` are the settings that the user has given."""
    given = [f"split.{name}" for name in ("cuts", *NAMES) if getattr(split, name)]
    if len(given) > 1 and given[0] == "split.cuts" and {*given[:2]} <= chosen:
        raise ValueError(
            f"{given[0]} and {given[1]} both settle the cuts: leave one of the two out"
        )


def resume_machines(split: SplitSettings, before: SplitSettings, chosen: set[str]) -> SplitSettings:
    """What a resumed run knows of its machines, with its cuts where nothing of that has changed.

    What was measured is not measured again. What was said of other numbers of blocks is dropped.
    """
    known = {name: getattr(before, name) for name in NAMES}
    asked = {name: getattr(split, name) for name in NAMES if f"split.{name}" in chosen}
    others = {name: asked.get(name, []) for name in NAMES}
    if "split.cuts" in chosen and split.cuts:
        return split.model_copy(update=others)
    if split.blocks != len(before.cuts) + 1:
        others = {name: [] if x == known[name] else x for name, x in others.items()}
        dropped = [f"split.{name}" for name in NAMES if known[name] and not others[name]]
        if dropped and not launch.launched_rank():
            count = counted(len(before.cuts) + 1, "block")
            tell(f"hybrid: {' and '.join(dropped)} dropped, of the run's {count} before")
        return split.model_copy(update=others)
    kept = {n: known[n] if x == MEASURED and known[n] else x for n, x in (known | asked).items()}
    return split.model_copy(update=kept if kept == known else {**kept, "cuts": []})


def measure_machine(config: Config) -> Machine | None:
    """Measure this rank's machine, if that is asked for.

    The fastest pass counts: other programs come and go.
    """
    if MEASURED not in (config.split.speeds, config.split.memory):
        return None
    device = launch.device(config.train.device)
    grid = Grid(config.split.blocks, config.split.replicas)
    torch.set_num_threads(config.train.threads or launch.threads_per_rank(grid.ranks))
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    network, x, times = nn.Sequential(*layers).to(device), torch.randn(ROWS, WIDTH).to(device), []
    for _ in range(PASSES + 1):
        start = perf_counter()
        network(x).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    rooms = dict(available_memory())
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device).uuid
        rooms = {f"GPU {gpu}": torch.cuda.mem_get_info(device)[0]}
    return Machine(1 / min(times[1:]), {(gethostname(), name): x for name, x in rooms.items()})


def available_memory(root: Path = Path("/")) -> Iterator[tuple[str, int]]:
    """What limits this process's memory, and the bytes that are left there."""

    def table(path: str) -> dict[str, str]:
        lines = (root / path).read_text().splitlines()
        return dict(line.partition(":")[::2] for line in lines)

    yield "host", int(table("proc/meminfo")["MemAvailable"].split()[0]) * 1024
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / kind
        limit, usage = ("limit_in_bytes", "usage_in_bytes") if kind else ("max", "current")
        folder = mount / path.strip("/")
        while folder.is_relative_to(mount):
            with suppress(OSError, ValueError):  # "max", or a group that is not to be seen here
                most, used = (int((folder / f"memory.{x}").read_text()) for x in (limit, usage))
                words = (folder / "memory.stat").read_text().split()
                stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
                cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                yield f"group {folder.stat().st_ino}", most - used + cached
            folder = folder.parent
    for limit_, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        if (most := resource.getrlimit(limit_)[0]) != resource.RLIM_INFINITY:
            used = int(table("proc/self/status")[name].split()[0]) * 1024
            yield f"{name} of {os.getpid()}", most - used


def settle_machines(split: SplitSettings, machines: Sequence[Machine]) -> SplitSettings:
    """Write what all ranks have measured in place of "measured"; the same on every rank.

    In one process the blocks share its machine.
    """
    grid, ranks = Grid(split.blocks, split.replicas), [*machines]
    if len(ranks) < grid.ranks:
        ranks *= grid.ranks
    sharing = Counter(key for machine in ranks for key in machine.memory)
    fastest = max(machine.speed for machine in ranks)
    side: Arrangement = "chain" if split.side_by_side == "auto" else split.side_by_side
    numbers = dict[str, list[float]](speeds=[1.0] * grid.blocks, memory=[1e6] * grid.blocks)
    for rank, machine in enumerate(ranks):
        room = min(num_bytes / sharing[key] for key, num_bytes in machine.memory.items())
        each = {"speeds": machine.speed / fastest, "memory": room / 1e9}
        k = grid.place(rank, side).block
        for name, x in each.items():
            numbers[name][k] = min(numbers[name][k], max(0.01, round(x, 2)))
    measured = {name: x for name, x in numbers.items() if getattr(split, name) == MEASURED}
    return split.model_copy(update=measured)
