"""The fastest way to train, link by link: calculated rates, weighed by what a step is worth.

    python docs/benchmarks/filled_map.py rates [--models resnet20 wrn-16-4 resnet18 gpt-8-256]
    python docs/benchmarks/filled_map.py check --models resnet20
    python docs/benchmarks/filled_map.py table
    python docs/benchmarks/filled_map.py picture

`rates`: units, packing and optimizer steps are timed once on this machine, one thread. Pipelines
then take what `budget.Pipeline` says (a flushed one what its order takes), and replicas what
`hybrid plan` simulates, on 2, 4 and 8 ranks and links of 10 Mb/s to 400 Gb/s (one machine's
memory). Mini-batches have 128 images, or 32 texts of 128 bytes, in 2, 4 or 8 parts, whichever is
best for a way. Cuts are balanced by
measured time, as far as units allow. `check` runs the real programs on virtual links of 100 Mb/s
and 1 Gb/s beside it.

`table` and `picture` weigh each rate by the progress of a step over an exact one: of late gradients
as `hybrid plan` has it (tolerance.md), of local steps WORTH, of replicas that talk every 8 or 16
steps PARTED, all measured on ResNets. The same WORTH and PARTED stand for the GPT, unmeasured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from time import thread_time
from typing import Any

import measuring
import torch
from torch import Tensor

from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import BASE, Recipe
from hybrid.data import Data, Texts
from hybrid.links import LinkSpeed
from hybrid.networks import models
from hybrid.settings.resolve import resolve
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Solver
from hybrid.solvers.engine.schedule import Kind, Span, flushed
from hybrid.solvers.local_work.budget import Cost, Pipeline
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.solvers.wire import Wire
from hybrid.training import build

RAW = measuring.Raw(__file__)
LINKS = {
    "10 Mb/s": (1e7, 1e-4),
    "100 Mb/s": (1e8, 1e-4),
    "1 Gb/s": (1e9, 1e-4),
    "10 Gb/s": (1e10, 1e-5),
    "memory": (4e11, 1e-6),
}
"""Bits a second, and latency in seconds."""
FORMATS = ("float32", "int8")
PARTS = 2, 4, 8
WORTH = 0.3
"""Progress of local steps over that of the pipeline's on as many samples: filled_waits.py."""
PARTED = 0.73
"""Of replicas by local-sgd and diloco over a common step: strategies.md, two replicas."""
BLOCKS = "ddg", "fdg", "filled"
LENGTH, TEXTS = 128, 32


SYNCS = {
    "replicas, float32": AllReduce(),
    "replicas, int8": AllReduce(messages="int8"),
    "replicas, local-sgd": LocalSGD(steps=8),
    "replicas, diloco": DiLoCo(steps=16),
}


def planner_of(model: str) -> Planner:
    """With the units' measured times, on mini-batches of random samples."""
    text = model.startswith("gpt")
    asked: dict[str, Any] = {
        "model": {"name": model},
        "data": {"name": "synthetic"},
        "train": {"threads": 1, "batch_size": TEXTS if text else 128},
        "optimizer": {"name": "adamw" if text else "sgd"},
    }
    if text:
        asked["optimizer"]["lr"] = 0.001
    settings = resolve(asked)
    torch.manual_seed(0)
    samples: Data
    if text:
        bytes_ = torch.randint(256, (TEXTS * 40 + LENGTH,), dtype=torch.uint8)
        samples = Texts(bytes_, torch.arange(TEXTS * 40 - 1), LENGTH)
        network = models.build(model, 256, length=LENGTH)
    else:
        samples, _ = build.load_own(settings.data)
        network = build.build_model(settings, samples)
    return Planner(settings, network, samples, LinkSpeed())


class Timed:
    """What passes, messages and steps of a network in K blocks take, in seconds."""

    def __init__(self, planner: Planner, K: int, m: int) -> None:
        self.blocks, self.m, self.n = planner.blocks(K), m, ceil(planner.size / m)
        units = planner.timed.costs(self.blocks, self.n)
        ends = [*self.blocks.starts[1:], len(units)]
        self.costs = [
            Cost(*(sum(way) for way in zip(*units[a:b], strict=True)))
            for a, b in zip(self.blocks.starts, ends, strict=True)
        ]
        self.shapes = [tuple(x.shape[1:]) for x in planner.timed.inputs(self.blocks)[1:]]
        kind = torch.optim.AdamW if planner.settings.optimizer.name == "adamw" else torch.optim.SGD
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.packing: dict[tuple[Any, ...], float] = {}
        self.steps = []
        for k in range(K):
            weights = [p.detach().clone() for p in self.blocks.module(k).parameters()]
            for w in weights:
                w.grad = torch.ones_like(w)
            self.steps.append(_seconds(kind(weights, lr=1e-6, **more).step))

    def messages(self, form: str, network: LinkSpeed) -> tuple[list[float], list[float]]:
        """Of a micro-batch over every cut: what it occupies, and what both its ends pack."""
        wire, occupied, packing = Wire(form), [], []
        for shape in self.shapes:
            sent = list[Tensor]()
            wire.send(sent.append, torch.zeros(1, *shape))
            occupied.append(network.seconds(self.n * sum(x.nbytes for x in sent)))
            key = form, shape
            if key not in self.packing:
                x = torch.randn(self.n, *shape)
                self.packing[key] = _seconds(partial(_pass_on, wire, x))
            packing.append(self.packing[key])
        return occupied, packing

    def pipeline(self, solver: Solver, form: str, network: LinkSpeed) -> Pipeline:
        """The delayed pipeline; its steps count with the messages as work beside the passes."""
        K = len(self.costs)
        occupied, cuts = self.messages(form, network)
        beside = [
            step / self.m + sum(cuts[max(0, k - 1) : k + 1]) for k, step in enumerate(self.steps)
        ]
        alone = [each + network.latency_seconds for each in occupied]
        delays = [solver.delay(k, K) for k in range(K)]
        return Pipeline(self.costs, delays, self.n, alone, occupied, beside)

    def flushed(self, form: str, network: LinkSpeed) -> float:
        """Seconds of a mini-batch in a flushed pipeline."""
        p = self.pipeline(DDG(micro_batches=self.m), form, network)
        K, (f, b) = len(self.costs), p.passes()
        span = Span.of([self.m])
        orders = [
            deque(a for a in flushed(k, K, span) if a.kind is not Kind.STEP) for k in range(K)
        ]
        free = [0.0] * K
        up, down = ([dict[int, float]() for _ in range(K)] for _ in range(2))
        wires = [[0.0, 0.0] for _ in range(K)]
        while any(orders):
            for k, order in enumerate(orders):
                while order:
                    kind, i = order[0].kind, order[0].micro_batch
                    forward = kind is Kind.FORWARD
                    inbox = up[k] if forward else down[k]
                    if i not in inbox and (k > 0 if forward else k < K - 1):
                        break
                    order.popleft()
                    free[k] = max(free[k], inbox.get(i, 0.0)) + (f[k] if forward else b[k])
                    to = k + 1 if forward else k - 1
                    if 0 <= to < K:
                        cut, way = min(k, to), int(forward)
                        wires[cut][way] = max(wires[cut][way], free[k]) + p.occupied[cut]
                        box = up[to] if forward else down[to]
                        box[i] = wires[cut][way] + network.latency_seconds
        return max(free)


def _seconds(work: Callable[[], Any]) -> float:
    """The least of five."""
    times = []
    for _ in range(5):
        start = thread_time()
        work()
        times.append(thread_time() - start)
    return min(times)


def _pass_on(wire: Wire, x: Tensor) -> None:
    packed = list[Tensor]()
    wire.send(packed.append, x)
    wire.receive(iter(packed).__next__, x.dtype)


def rates(names: list[str]) -> None:
    torch.set_num_threads(1)
    for model in names:
        planner = planner_of(model)
        base = planner.predict(planner.blocks(1), BASE).images_per_second
        for K in (2, 4, 8):
            if planner.timed.num_units < K:
                continue
            ways = [Timed(planner, K, m) for m in PARTS]
            for link, (bits, latency) in LINKS.items():
                network = planner.network = LinkSpeed(bits / 8, latency)
                rows = best_of(in_blocks(planner, timed, network, base) for timed in ways)
                for name, sync in SYNCS.items():
                    recipe = replace(BASE, sync=sync)
                    prediction = planner.predict(planner.blocks(1), recipe, 2, replicas=K)
                    gain = prediction.images_per_second / base
                    rows[name] = {"speed_up": gain, "progress": 1.0, "local": 0.0}
                RAW.keep(f"{model}, K={K}, {link}", value=rows)
                print(model, K, link, {k: round(v["speed_up"] or 0, 2) for k, v in rows.items()})


Rows = dict[str, dict[str, float | None]]


def best_of(tables: Iterable[Rows]) -> Rows:
    """Each way in the number of parts in which it makes the most progress."""
    best: Rows = {}
    for rows in tables:
        for name, row in rows.items():
            if name not in best or weighed(name, row) > weighed(name, best[name]):
                best[name] = row
    return best


def in_blocks(planner: Planner, timed: Timed, network: LinkSpeed, base: float) -> Rows:
    """By way: the rate over one rank's, the progress of a late step, the share of local steps."""
    rows: Rows = {}
    K, size, m = len(timed.costs), planner.size, timed.m
    for form in FORMATS:
        gain = size / timed.flushed(form, network) / base
        rows[f"flushed, {form}"] = {"speed_up": gain, "progress": 1.0, "local": 0.0, "m": m}
        for kind in (DDG, FDG):
            solver = kind(micro_batches=m)
            pipeline = timed.pipeline(solver, form, network)
            late = solver.progress(K, size, planner.settings.optimizer.name)
            local = sum(map(sum, pipeline.fit())) / (K * timed.n)
            gain = size / (m * pipeline.tick()) / base
            row = {"speed_up": gain, "progress": late, "local": 0.0, "m": m}
            rows[f"{solver.name}, {form}"] = row
            rows[f"{solver.name} filled, {form}"] = {**row, "local": local}
    return rows


def check(names: list[str]) -> None:
    """Beside the calculated rates those of the real programs on virtual links."""
    torch.set_num_threads(1)
    K, m, lines = 4, 8, []
    for model in names:
        planner = planner_of(model)
        base = planner.predict(planner.blocks(1), BASE).images_per_second
        timed = Timed(planner, K, m)
        for link, form, kind, fill in product(
            ("100 Mb/s", "1 Gb/s"), FORMATS, (DDG, FDG), (None, AugmentedLagrangian())
        ):
            bits, latency = LINKS[link]
            planner.network = LinkSpeed(bits / 8, latency)
            way = f"{kind.name}{' filled' * (fill is not None)}, {form}"
            calculated = in_blocks(planner, timed, planner.network, base)[way]["speed_up"]
            solver = kind(micro_batches=m, messages=form)
            recipe = Recipe("row", solver, **({} if fill is None else {"fill": fill}))
            real = planner.predict(timed.blocks, recipe, steps=2)
            gain = f"{real.images_per_second / base:.2f}"
            cell = f"{model}, K={K}, {link}"
            lines.append((cell, way, f"{calculated:.2f}", gain, f"{real.local_share:.2f}"))
    measuring.show("network, K, link | way | calculated | virtual | local steps", lines)


def weighed(name: str, row: dict[str, float | None]) -> float:
    """Progress a second over one rank's; 0 where what the delay costs is not known."""
    rate, late, local = row["speed_up"], row["progress"], row["local"]
    assert rate is not None
    if name.endswith(("local-sgd", "diloco")):
        return PARTED * rate
    return rate * (late or 0.0) * (1 + WORTH * (local or 0.0))


GROUPS = {
    "one rank": (),
    "replicas": ("replicas, float32", "replicas, int8"),
    "local-sgd, diloco": ("replicas, local-sgd", "replicas, diloco"),
    "flushed": tuple(f"flushed, {form}" for form in FORMATS),
    "ddg, fdg": tuple(f"{kind}, {form}" for kind in ("ddg", "fdg") for form in FORMATS),
    "filled": tuple(f"{kind} filled, {form}" for kind in ("ddg", "fdg") for form in FORMATS),
}


def of_cell(rows: dict[str, dict[str, float | None]]) -> dict[str, tuple[float, str]]:
    """By group: the best in it, and its name."""
    best = {"one rank": (1.0, "one rank")}
    for group, names in GROUPS.items():
        if names:
            best[group] = max((weighed(name, rows[name]), name) for name in names)
    return best


def impossible(cell: str, row: dict[str, float | None]) -> bool:
    """Whether a rate is above the number of ranks: its parts were timed at different moments."""
    return (row["speed_up"] or 0.0) > int(cell.split("K=")[1].split(",")[0])


def table() -> None:
    figures = RAW.read()
    names = list(GROUPS)
    print(f"| network, K, link | {' | '.join(names[1:])} | first | filled over the next |")
    print("|---|" + "---|" * (len(names) + 1))
    first = near = blocks = ahead = 0
    for cell, rows in figures.items():
        best = of_cell(rows)
        others = {group: value for group, value in best.items() if group != "filled"}
        ratio = best["filled"][0] / max(others.values())[0]
        winner = max(best.items(), key=lambda item: item[1][0])
        right = max(best[g][0] for g in ("flushed", "ddg, fdg", "filled")) >= max(
            best[g][0] for g in ("one rank", "replicas", "local-sgd, diloco")
        )
        blocks += right
        near += right and ratio >= 0.97
        first += right and ratio >= 1
        ahead += right and ratio >= 1.1
        high = {way for way, row in rows.items() if impossible(cell, row)}
        cells = " | ".join(f"{best[g][0]:.2f}{' !' * (best[g][1] in high)}" for g in names[1:])
        print(f"| {cell} | {cells} | {winner[1][1]} | {ratio:.2f} |")
    print("\n!: the rate, before it is weighed, is above the number of ranks, which cannot be")
    print(
        f"{len(figures)} cells; blocks are right in {blocks}; there filled is first or within 3 % "
        f"in {near}, first in {first}, first by 10 % in {ahead}"
    )


def picture() -> None:
    from matplotlib.figure import Figure

    figures = RAW.read()
    networks = list(dict.fromkeys(cell.split(",")[0] for cell in figures))
    colors = dict(
        zip(GROUPS, ("#bbbbbb", "#2b6ca3", "#7fb2d9", "#e8c87a", "#d9822b", "#3a9d6e"), strict=True)
    )
    figure = Figure(figsize=(2.75 * len(networks), 3.6), layout="constrained")
    for axes, network in zip(
        figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True
    ):
        for row, link in enumerate(LINKS):
            for column, K in enumerate((2, 4, 8)):
                rows = figures.get(f"{network}, K={K}, {link}")
                if rows is None:
                    continue
                best = of_cell(rows)
                if best["filled"][0] <= 1.005 * best["ddg, fdg"][0]:
                    del best["filled"]  # nobody waits, and it is the same
                order = sorted(best.items(), key=lambda item: -item[1][0])
                winner, (value, way) = order[0]
                margin = value / order[1][1][0]
                high = impossible(f"K={K},", rows.get(way, {"speed_up": 1.0}))
                axes.add_patch(_tile(column, row, colors[winner]))
                text = axes.text(column, row, f"{value:.2f}{'!' * high}\n+{margin - 1:.0%}")
                text.set(ha="center", va="center")
                text.set_color("white" if winner == "replicas" else "black")  # on its dark blue
        axes.set_xlim(-0.5, 2.5)
        axes.set_ylim(len(LINKS) - 0.5, -0.5)
        axes.set_xticks(range(3), ["K=2", "4", "8"])
        axes.set_yticks(range(len(LINKS)), list(LINKS) if network == networks[0] else [])
        axes.set_title(network, fontsize="medium")
        axes.tick_params(length=0)
    handles = [_tile(0, 0, color) for color in colors.values()]
    names = [*list(colors)[:-2], "filled = ddg, fdg: nobody waits", "filled"]
    place = {"ncols": 6, "loc": "outside lower center", "frameon": False, "fontsize": "small"}
    legend = figure.legend(handles, names, **place)
    legend.set_title("!: a calculated rate above the number of ranks, which cannot be")
    site = Path(__file__).parents[1] / "site"
    figure.savefig(site / "filled-map.png", dpi=110)


def _tile(column: float, row: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="white")


def main() -> None:
    models = ["resnet20", "wrn-16-4", "gpt-8-256", "resnet18"]
    options = measuring.options(__doc__, what=("rates", "check", "table", "picture"), models=models)
    if options.what in ("rates", "check"):
        {"rates": rates, "check": check}[options.what](options.models)
    else:
        {"table": table, "picture": picture}[options.what]()


if __name__ == "__main__":
    main()
