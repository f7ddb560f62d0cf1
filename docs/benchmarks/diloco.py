"""DiLoCo beside delayed pipelines: bits a byte, rates, and simulated times to a loss.

    python docs/benchmarks/diloco.py screen accuracy [--rows "R=8, H=*"]
    python docs/benchmarks/diloco.py rates
    mpirun -n 2 python docs/benchmarks/diloco.py real        on two hosts
    python docs/benchmarks/diloco.py table

    screen      gpt-8-64 for 375 steps on eight replicas: rates of the inner and the outer step
    accuracy    the same for 1,500 steps with the best rates, by the steps H between two sums
    rates       seconds a step of gpt-8-256 on virtual links, 16 texts of 128 bytes, AdamW
    real        the same on two ranks

The text, the mini-batches of 32 texts of 128 bytes (of all replicas together) and the optimizers
of trainings are those of to_the_end.py gpt: both have the same samples in the same order. Each
training runs on the virtual clock with one thread. A training that was broken off goes on from its
checkpoint, and those that are in diloco.json are not repeated.

A step of a pipeline is a twelfth of what 16 steps take longer than 4, so that it is full. A step of
DiLoCo is one without sums, and a share of a sum:

    seconds = c + (s + b / rate) / H

with c from four steps without a sum, s, the processor's time for a sum, from four steps with one,
and b the bytes that a replica sends. A row of 12 steps with a sum at 100 Mb/s checks this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import measuring
import to_the_end
import torch
import virtual_rates
from torch import nn

from hybrid import Trainer, split
from hybrid.bench.contenders import CPU, Contender, MethodContender, PlainLoop
from hybrid.bench.measure import still_batches, timed
from hybrid.links.base import Start
from hybrid.links.communicator import Communicator
from hybrid.links.mpi import MpiLinks
from hybrid.networks import models
from hybrid.ranks import launch
from hybrid.solvers import DDG, FDG, Backprop, Solver
from hybrid.solvers.sync.diloco import DiLoCo

RAW = measuring.Raw(__file__)


@dataclass(frozen=True)
class Row:
    """One training of gpt-8-64."""

    sync: DiLoCo | None = None
    """How replicas keep together; None: one replica."""
    replicas: int = 1
    blocks: int = 1
    solver: Solver = field(default_factory=Backprop)
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = 0.02
    """Of each replica's own steps."""
    steps: int = 1500
    texts: int = to_the_end.SIZE
    """Of a mini-batch."""


BEST = DiLoCo(outer_lr=1.0, outer_momentum=0.5, messages="int8")
"""The outer step, of the screen."""
INNER_LR = 0.02
"""Of Muon, of the screen."""
SHORT, MIDDLE, WHOLE = 375, 750, 1500


def screen() -> Iterator[tuple[str, Row]]:
    """Eight replicas; 15 outer steps, as many as 1,500 steps have with H = 100."""
    outers = (0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0), (1.0, 0.7)
    rates = {0.02: outers, 0.04: outers[1:3], 0.01: outers[2:3]}
    for lr, (eta, mu) in ((lr, outer) for lr, some in rates.items() for outer in some):
        outer = DiLoCo(steps=25, outer_lr=eta, outer_momentum=mu, messages="int8")
        title = f"lr {lr}, outer lr {eta}, momentum {mu}"
        yield title, Row(outer, 8, lr=lr, steps=SHORT)


def accuracy() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""

    def row(R: int, H: int, steps: int = 1500, **changes: Any) -> tuple[str, Row]:
        outer = replace(BEST, steps=H, messages=changes.pop("messages", "int8"))
        title = f"R={R}, H={H}" + f", {outer.messages}" * (outer.messages != "int8")
        title += ", AdamW" * (changes.get("optimizer") == "adamw")
        title += f", {steps} steps" * (steps != 1500)
        return title, Row(outer, R, **{"lr": INNER_LR, "steps": steps, **changes})

    yield from (row(8, 100), row(8, 25), row(4, 100), row(8, 50), row(8, 200), row(8, 12))
    yield f"one rank, {MIDDLE} steps", Row(steps=MIDDLE)
    large = Row(replace(BEST, steps=12), 8, lr=INNER_LR, steps=187, texts=256)
    yield "R=8, H=12, 187 steps of 256 texts", large
    yield from (row(4, 25), row(4, 50))
    yield "fdg, int8, K=8", late(FDG, 8, "int8")
    yield "ddg, int8, K=8", late(DDG, 8, "int8")
    yield row(8, 100, messages="float32")
    yield row(8, 100, optimizer="adamw", lr=to_the_end.BEST["AdamW"])
    yield from (row(4, 200), row(4, 12), row(2, 25), row(2, 100))
    yield "ddg, K=4", late(DDG, 4)
    yield "fdg, int8, K=4", late(FDG, 4, "int8")


def late(kind: Any, blocks: int, messages: str = "float32") -> Row:
    """A delayed pipeline."""
    solver = kind(micro_batches=to_the_end.M, messages=messages)
    return Row(blocks=blocks, solver=solver)


TABLES = {"screen": screen, "accuracy": accuracy}


def train(row: Row, seed: int, out: Path) -> None:
    """One training into its run folder, from where an earlier one was broken off."""
    windows = row.steps * row.texts
    outer: dict[str, Any] = {"replicas": row.replicas, "sync": row.sync} if row.sync else {}
    optimizer = to_the_end.of_text(row.optimizer, row.lr)
    as_there = to_the_end.Row(row.blocks, row.solver, optimizer, windows=windows)
    texts, held_out = to_the_end.samples(as_there, measuring.DATA, out.parent)
    torch.manual_seed(seed)
    measuring.on_virtual_links(
        *(models.gpt(8, 64, 256, to_the_end.LENGTH), row.blocks, row.solver),
        train={"epochs": 1, "batch_size": row.texts, "seed": seed},
        schedule={"warmup_epochs": to_the_end.WARM_UP},
        optimizer=optimizer,
        delay={"mend": "extrapolate" if row.blocks > 1 else "none"},
        checkpoint={"every": 1, "minutes": 5, "keep_last": 1},
        out=out,
        resume=(out / "checkpoints").exists(),
        names={"model": "gpt-8-64"},
        quiet=False,
        **outer,
    ).fit(texts, held_out)


def collect(runs: Path, seeds: list[int]) -> None:
    """The results of all runs there are, on top of what the JSON holds."""
    for name, rows in TABLES.items():
        for title, row in rows():
            for seed in seeds:
                folder = runs / name / measuring.slug(title, seed)
                kept = measuring.of_summary(
                    folder, "test_bits_per_byte images_per_second bytes_sent"
                )
                if kept is not None:
                    RAW.keep(name, title, str(seed), value=kept | {"steps": row.steps})


LINKS = {"10 Mb/s": 0.01, "100 Mb/s": 0.1, "1 Gb/s": 1.0}
"""Gigabits per second."""
M = to_the_end.M
PIPELINES: dict[str, Solver] = {
    "ddg, float32": DDG(micro_batches=M),
    "ddg, int8": DDG(micro_batches=M, messages="int8"),
    "fdg, int8": FDG(micro_batches=M, messages="int8"),
    "fdg, int8 / int4": FDG(micro_batches=M, messages="int8", adjoints="int4"),
    "fdg, int4": FDG(micro_batches=M, messages="int4"),
}
"""With the delays of the trainings: as many micro-batches."""
COUNTS, EVERY = (4, 8), (12, 25, 50, 100, 200)
FAST = 10.0
FEW, MANY = 4, 16
"""Steps."""


def rows_of_rates() -> Iterator[tuple[str, virtual_rates.Row, tuple[int, ...]]]:
    """Names, ways to train, and the numbers of steps whose simulated seconds are wanted."""
    row = virtual_rates.Row("gpt-8-256", optimizer=virtual_rates.ADAMW)
    yield "one rank", row, (FEW,)
    for n in COUNTS:
        without = replace(row, replicas=n, sync=DiLoCo(steps=FEW + 1), gigabits=FAST)
        yield f"{n} replicas", without, (FEW,)
        for form in "float32", "int8":
            summed = replace(without, sync=DiLoCo(steps=FEW, messages=form))
            yield f"{n} replicas, a sum, {form}", summed, (FEW,)
            checked = replace(row, replicas=n, sync=DiLoCo(12, messages=form), gigabits=0.1)
            yield f"{n} replicas, H=12, 100 Mb/s, {form}", checked, (12,)
        for name, solver in PIPELINES.items():
            for link, rate in LINKS.items():
                late = replace(row, solver=solver, blocks=n, extrapolated=True, gigabits=rate)
                yield f"{name}, K={n}, {link}", late, (FEW, MANY)


def rates(names: str) -> None:
    """A turn of all rows of such names; the JSON holds the turns of earlier calls, too."""
    for name, row, counts in rows_of_rates():
        if fnmatchcase(name, names):
            size = virtual_rates.samples(row.model, 1, measuring.DATA)[2]
            seconds = [n * size / virtual_rates.train(row, n, measuring.DATA) for n in counts]
            turns = [*(RAW.get("rates", name) or []), seconds]
            RAW.keep("rates", name, value=turns)
            print(name, *(f"{x:.3f}" for x in seconds), flush=True)


def step_seconds(name: str) -> list[float]:
    """Seconds of a step of every turn, without the time in which a pipeline fills and empties."""
    counts = {name: counts for name, _, counts in rows_of_rates()}[name]
    steps = counts[-1] - counts[0] if len(counts) > 1 else counts[0]
    return [
        (turn[-1] - (turn[0] if len(turn) > 1 else 0)) / steps for turn in RAW.get("rates", name)
    ]


def sum_bytes(replicas: int, form: str) -> float:
    """What a replica sends for a sum, as virtual links count it: two hops."""
    weights = sum(p.numel() for p in models.gpt(8, 256, 256, virtual_rates.LENGTH).parameters())
    return 2 * (replicas - 1) / replicas * weights * (4 if form == "float32" else 1)


def diloco_seconds(replicas: int, H: int, link: float, form: str) -> list[float]:
    """Seconds of a step of every turn."""
    computed = step_seconds(f"{replicas} replicas")
    summed = step_seconds(f"{replicas} replicas, a sum, {form}")
    sent = 8e-9 * sum_bytes(replicas, form)
    work = FEW * (median(summed) - median(computed)) - sent / FAST
    return [c + (max(work, 0) + sent / link) / H for c in computed]


TURNS, LINK = 3, "100 Mb/s"


def real() -> None:
    """Seconds a step on two ranks, in turns; of the plain loop, on one while the other waits."""
    comm = launch.communicator()
    assert comm is not None
    launch.keep_memory()
    loop = PlainLoop(gpt(), virtual_rates.ADAMW, here=comm.rank == 0)
    outer = {"replicas": 2, "sync": replace(BEST, steps=50)}
    rows: dict[str, tuple[int, Contender]] = {
        "one rank": (3, loop),
        "diloco, H=50, int8": (50, contender(Backprop(), 1, comm, **outer)),
        "ddg, int8": (
            24,
            contender(PIPELINES["ddg, int8"], 2, comm, delay={"mend": "extrapolate"}),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    texts, _, size = virtual_rates.samples("gpt-8-256", 50, measuring.DATA)
    for turn in range(TURNS + 1):
        for name, (steps, row) in rows.items():
            batches = still_batches(texts, size, steps, CPU)
            taken = timed(comm, partial(row.train, batches)) / steps
            if turn:  # the first warms up
                seconds[name].append(taken)
    if comm.rank == 0:
        RAW.keep("real", LINK, value=seconds)


def gpt() -> nn.Sequential:
    torch.manual_seed(0)
    return models.build("gpt-8-256", 256, length=virtual_rates.LENGTH)


def contender(solver: Solver, blocks: int, comm: Communicator, **more: Any) -> Contender:
    """A method on this rank."""
    texts, held_out, size = virtual_rates.samples("gpt-8-256", 1, measuring.DATA)
    trainer = Trainer(
        split(gpt(), blocks, balance="measured"),
        solver,
        train={"batch_size": size, "threads": 1},
        optimizer=virtual_rates.ADAMW,
        quiet=True,
        **more,
    )
    method = trainer.make_method(texts, comm.size, held_out)
    return MethodContender(method, MpiLinks(Start.of(comm, comm.size // blocks)))


def bits(title: str) -> float | None:
    """Bits a byte after a training of this script or of to_the_end.py, seed 0."""
    there = measuring.Raw(to_the_end.__file__)
    elsewhere = {
        "one rank": (there, "gpt", "Muon, flushed"),
        "ddg, K=8": (there, "gpt", "ddg, Muon, extrapolated, K=8"),
        f"one rank, {SHORT} steps": (there, "gpt-rates", f"Muon, flushed, lr {INNER_LR}"),
    }
    raw, *path = elsewhere.get(title, (RAW, "accuracy", title))
    rows = raw.get(*path)
    values = [
        row.get("test_bits_per_byte") or row["test_metrics"]["bits_per_byte"]
        for seed, row in rows.items()
        if seed == "0"
    ]
    return mean(values) if values else None


def progress(title: str) -> float | None:
    """The share of its steps after which one rank has as many bits, in trainings of that length.

    One rank's bits are interpolated in log2 of its steps; 1 where it has no fewer, None where it
    has fewer after the first steps known.
    """
    names = {n: "one rank" + f", {n} steps" * (n < WHOLE) for n in (SHORT, MIDDLE, WHOLE)}
    ends = [(n, x) for n, name in names.items() if (x := bits(name)) is not None]
    own = bits(title)
    if own is not None and ends and own <= ends[-1][1]:
        return 1.0
    for (n, x), (m, y) in pairwise(ends):
        if own is not None and y <= own <= x:
            return float(m * (n / m) ** ((own - y) / (x - y))) / WHOLE
    return None


def tables() -> None:
    """Print what the JSON holds."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    names = [title for title, _ in accuracy()]
    measuring.show(
        "1,500 steps unless said | bits a byte | progress of a step",
        (
            (n, f"{b:.3f}", cell(progress(n)))
            for n in ["one rank", "ddg, K=8", *names]
            if (b := bits(n))
        ),
    )
    alone = median(step_seconds("one rank"))
    seconds: dict[tuple[int, str, str], float] = {}
    for n in COUNTS:
        for link, rate in LINKS.items():
            for name in PIPELINES:
                if turns := step_seconds(f"{name}, K={n}, {link}"):
                    seconds[n, link, name] = median(turns)
            for form in "int8", "float32":
                for H in EVERY:
                    name = f"diloco, H={H}" + ", float32" * (form == "float32")
                    seconds[n, link, name] = median(diloco_seconds(n, H, rate, form))
    columns = [(n, link) for n in COUNTS for link in LINKS]
    rows = dict.fromkeys(name for _, _, name in seconds)

    header = " | ".join(f"{n} ranks, {link}" for n, link in columns)
    measuring.show(
        f"over one rank | {header}",
        (
            (row, *(cell(alone / x if (x := seconds.get((*c, row))) else None) for c in columns))
            for row in rows
        ),
    )
    for n in COUNTS:
        for form in "int8", "float32":
            name = f"{n} replicas, H=12, 100 Mb/s, {form}"
            simulated, by_parts = step_seconds(name), diloco_seconds(n, 12, 0.1, form)
            print(name, f"simulated {median(simulated):.3f}, by parts {median(by_parts):.3f}")

    def to_a_loss(row: str, n: int, link: str) -> float | None:
        """The speed-up times the progress of a step, of another format if it has none."""
        own, (method, *_) = seconds.get((n, link, row)), row.split(", ")
        titles = [f"{row}, K={n}", f"{method}, K={n}", row.replace(method, f"R={n}")]
        shares = [share for title in titles if (share := progress(title)) is not None]
        return alone / own * shares[0] if own and shares else None

    measuring.show(
        f"time to a loss, over one rank | {header}",
        ((row, *(cell(to_a_loss(row, *c)) for c in columns)) for row in rows),
    )


def main() -> None:
    options = measuring.options(
        __doc__,
        whats=(*TABLES, "rates", "real", "table"),
        runs=Path("runs/diloco"),
        seeds=[0],
        rows="*",
    )
    torch.set_num_threads(1)
    for name in [what for what in options.whats if what in TABLES]:
        for title, row in TABLES[name]():
            for seed in options.seeds if fnmatchcase(title, options.rows) else ():
                out = options.runs / name / measuring.slug(title, seed)
                if not (RAW.get(name, title, str(seed)) or (out / "summary.json").exists()):
                    out.parent.mkdir(parents=True, exist_ok=True)
                    train(row, seed, out)
    if launch.communicator() is None:
        collect(options.runs, options.seeds)
    if "rates" in options.whats:
        rates(options.rows)
    if "real" in options.whats:
        real()
    if "table" in options.whats:
        tables()


if __name__ == "__main__":
    main()
