"""The profile of this machine, for plans that are made elsewhere."""

from __future__ import annotations

import platform
from itertools import takewhile
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import torch
from torch import nn

from hybrid.errors import one_line
from hybrid.files import check_place
from hybrid.method.blocks import make_optimizer, placed
from hybrid.networks.costs import count_moved
from hybrid.networks.units import Unit
from hybrid.plan.device import Device, Measured
from hybrid.plan.subject import Say, Subject
from hybrid.ranks import launch
from hybrid.settings.config import Config
from hybrid.training import build

STEPS = 20
"""Of the optimizer, timed."""


def write_profile(settings: Config, path: Path, say: Say) -> str:
    """Time every unit's passes over 2, 4, 8, ... samples up to a mini-batch; say what was written.

    On a GPU where train.device chooses one. ValueError for a network that is known by the time of
    its blocks alone, because it is cut inside its units or is not of this package; and, before
    anything is measured, for a place where the profile cannot be written.
    """
    _check_place(path)
    device = launch.device(settings.train.device)
    torch.set_num_threads(settings.train.threads or 1)
    data, _ = build.load_data_sets(settings.data)
    subject = Subject(settings, build.build_network(settings, data), data, say, on=device)
    if not subject.by_units:
        raise ValueError(
            f"the units of {settings.model.name} are timed as blocks, which another cut changes: "
            "give a [roofline] in the profile"
        )
    size, blocks = settings.train.batch_size, subject.blocks(1, settings.train.batch_size)
    sizes = [*takewhile(lambda n: n < size, (2**i for i in range(1, 30))), size]
    subject.measure(blocks, *sizes)
    table = [[list(way) for way in zip(*subject.costs(blocks, n), strict=True)] for n in sizes]
    gpu = device.type == "cuda"
    host = _operation_seconds(device)
    profile = Device(
        name=torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} CPU",
        memory_gb=torch.cuda.get_device_properties(device).total_memory / 1e9 if gpu else None,
        measured=Measured(
            model=settings.model.name,
            units=[unit.name for unit in blocks.units],
            samples=sizes,
            forward=[forward for forward, _ in table],
            backward=[backward for _, backward in table],
            step_seconds_per_byte=_step_seconds(settings, subject.model, device),
            seconds_per_operation=host,
        ),
    )
    profile.write(path)
    return (
        f"wrote {path}: {len(blocks.units)} units over {', '.join(map(str, sizes))} samples; "
        f"seconds_per_operation of this host is {host:.2g}"
    )


def _check_place(path: Path) -> None:
    try:
        check_place(path)
    except OSError as error:
        raise ValueError(
            f"--measure cannot write {path}, because of its folder ({one_line(error)}): make it, "
            "or choose another"
        ) from None


def _step_seconds(settings: Config, model: nn.Module, device: torch.device) -> float:
    """Of a step of the optimizer, by bytes of weights."""
    optimizer = make_optimizer(placed(model, device), settings.optimizer)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for p in weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()  # which makes what it keeps
    start = _now(device)
    for _ in range(STEPS):
        optimizer.step()
    return (_now(device) - start) / STEPS / sum(int(p.nbytes) for p in weights)


def _operation_seconds(device: torch.device) -> float:
    """That this host takes to issue an operation of passes too small to take time themselves."""
    layers = nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(4, 4), nn.ReLU())))
    layers, x = layers.to(device), torch.ones(2, 4, device=device)
    ((forward, backward),) = count_moved(layers, [Unit("layers", {"layers": layers})], x)
    clock = thread_time if device.type == "cpu" else perf_counter
    taken = []
    for _ in range(10):
        _now(device)
        start = clock()
        layers(x).backward(torch.ones_like(x))
        taken.append(clock() - start)
    return median(taken) / len(forward + backward)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
