"""The machines that blocks run on, as split.speeds and split.memory have them, or measured."""

import os
import re
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
_LIMITS = {"": ("max", "current"), "memory": ("limit_in_bytes", "usage_in_bytes")}
"""Files of control groups of version 2, and of 1."""


class Machine(NamedTuple):
    """What a rank has measured of its machine."""

    speed: float
    """Passes a second."""
    memory: dict[tuple[str, str], int]
    """Bytes available to all ranks together that have the same key: a host and what limits it."""


def check_machines(split: SplitSettings) -> None:
    """ValueError unless each of the blocks has a number, or will have one."""
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
    name = next((f"split.{name}" for name in NAMES if getattr(split, name)), "")
    if split.cuts and {"split.cuts", name} <= chosen:
        raise ValueError(f"split.cuts and {name} both settle the cuts: leave one of the two out")


def resume_machines(split: SplitSettings, before: SplitSettings, chosen: set[str]) -> SplitSettings:
    """What a resumed run knows of its machines, with its cuts where nothing of that has changed.

    What was measured is not measured again. What was said of other blocks is dropped.
    """
    same, updates = split.blocks == len(before.cuts) + 1, dict[str, object]()
    for name in NAMES:
        old, new = getattr(before, name), getattr(split, name)
        if same and new == MEASURED:
            new = old or new
        elif old == new and ("split.cuts" in chosen or not same):
            new = []
            if old and not same and not launch.launched_rank():
                blocks = counted(len(before.cuts) + 1, "block")
                tell(f"hybrid: split.{name} is dropped, which was of {blocks}")
        if old != new and "split.cuts" not in chosen:
            updates["cuts"] = []
        updates[name] = new
    return split.model_copy(update=updates)


def measure_machine(config: Config) -> Machine | None:
    """Measure this rank's machine, if that is asked for, by 25 passes through four layers.

    The fastest counts: other programs come and go.
    """
    if MEASURED not in (config.split.speeds, config.split.memory):
        return None
    device = launch.device(config.train.device)
    ranks = config.split.blocks * config.split.replicas
    torch.set_num_threads(config.train.threads or launch.threads_per_rank(ranks))
    network = nn.Sequential(*[nn.Linear(1024, 1024), nn.GELU()] * 4).to(device)
    x, seconds = torch.ones(64, 1024, device=device), list[float]()
    for _ in range(25):
        start = perf_counter()
        network(x).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    rooms = dict(available_memory())
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device).uuid
        rooms = {f"GPU {gpu}": torch.cuda.mem_get_info(device)[0]}
    return Machine(1 / min(seconds), {(gethostname(), name): x for name, x in rooms.items()})


def available_memory(root: Path = Path("/")) -> Iterator[tuple[str, int]]:
    """What limits this process's memory (host, control groups, ulimit), and what is left there."""

    def table(path: Path | str) -> dict[str, int]:
        rows = re.findall(r"^(\w+):?\s+(\d+)", (root / path).read_text(), re.MULTILINE)
        return {name: int(number) for name, number in rows}

    yield "host", table("proc/meminfo")["MemAvailable"] * 1024
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup" / kind
        folder = mount / path.strip("/")
        while kind in _LIMITS and folder.is_relative_to(mount):
            with suppress(OSError, ValueError):  # "max", or a group that is not to be seen here
                most, used = (int((folder / f"memory.{x}").read_text()) for x in _LIMITS[kind])
                stat = table(folder / "memory.stat")
                cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                yield f"group {folder.stat().st_ino}", most - used + cached
            folder = folder.parent
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            used = table("proc/self/status")[name] * 1024
            yield f"{name} of {os.getpid()}", most - used


def settle_machines(split: SplitSettings, machines: Sequence[Machine]) -> SplitSettings:
    """Write what all ranks have measured in place of "measured"; the same on every rank.

    In one process the blocks share its machine.
    """
    grid = Grid(split.blocks, split.replicas)
    ranks = [*machines] * (grid.ranks // len(machines))
    sharing = Counter(key for machine in ranks for key in machine.memory)
    fastest = max(machine.speed for machine in ranks)
    side: Arrangement = "chain" if split.side_by_side == "auto" else split.side_by_side
    numbers = {name: [1e6] * grid.blocks for name in NAMES}
    for rank, machine in enumerate(ranks):
        room = min(num_bytes / sharing[key] for key, num_bytes in machine.memory.items())
        k = grid.place(rank, side).block
        for name, x in zip(NAMES, (machine.speed / fastest, room / 1e9), strict=True):
            numbers[name][k] = min(numbers[name][k], max(0.01, round(x, 2)))
    measured = {name: x for name, x in numbers.items() if getattr(split, name) == MEASURED}
    return split.model_copy(update=measured)
