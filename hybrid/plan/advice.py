"""What a plan says: a table of all predictions, and for every number of ranks the command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from shlex import quote
from typing import Any

from hybrid.bench.recipes import BASE
from hybrid.errors import StoppedError
from hybrid.links import Network
from hybrid.links.grid import Grid, Place
from hybrid.method.settle import check_replicas
from hybrid.plan.device import Device
from hybrid.plan.planner import Planner
from hybrid.plan.prediction import Prediction, best, waste
from hybrid.plan.subject import Say
from hybrid.settings.config import Config, TrainSettings
from hybrid.settings.resolve import check_command, refuse_rounds, resolve
from hybrid.training import build

_FLAGS = ("model.name", "data.name", "train.batch_size", "train.loss")
"""Settings that a command says by flags of their own."""


def report(
    settings: Config,
    counts: Sequence[int] | None,
    ranks: Sequence[int],
    micro_batches: Sequence[int],
    say: Say,
    device: Device | None = None,
) -> Iterator[str]:
    """The rows of all predictions, each as soon as it is made, and then the commands to take.

    Of `counts` of blocks (None: of its cuts, or 2 and 4), on as many ranks for each replica of the
    settings, or of every grid of so many `ranks`; of ranks like this machine, or of a device.
    A plan that is interrupted, by Ctrl-C or TERM, gives the advice of its rows so far, and raises
    StoppedError.
    """
    cuts, R = settings.split.cuts, settings.split.replicas or 1
    _refuse(settings)
    if counts is None and not ranks:
        counts = [len(cuts) + 1] if cuts else [2, 4]
    wanted = [Grid(count, R) for count in counts or ()]
    if cuts and (ranks or any(grid.blocks != len(cuts) + 1 for grid in wanted)):
        raise ValueError(
            f"split.cuts names {len(cuts)} cuts, which make {len(cuts) + 1} blocks: leave it out, "
            "or --blocks and --ranks"
        )
    if R == 1 and not ranks:
        check_replicas(build.build_options(settings))
    data, _ = build.load_data_sets(settings.data)
    network = Network.asked(settings.links)
    if device is not None and device.network is not None:
        network = device.network.network()
    model = build.build_network(settings, data)
    planner = Planner(settings, model, data, network, say, device)
    wanted += [grid for count in ranks for grid in planner.grids(count)]
    predictions = planner.predicted(wanted, micro_batches, cuts)
    found = [next(predictions)]
    alone = planner.on_one_rank(micro_batches)
    at_best = _at_best(planner, alone, dict.fromkeys(grid.ranks for grid in wanted))
    epoch, rate = len(data), alone[0].images_per_second
    yield from _HEAD.format(samples=planner.subject.samples).splitlines()
    yield from (row(p, epoch, rate) for p in alone)
    yield from (data_parallel_row(n, each, epoch, rate) for n, each in at_best.items())
    yield row(found[0], epoch, rate)
    interrupted = False
    try:
        for p in predictions:
            found.append(p)
            yield row(p, epoch, rate)
    except KeyboardInterrupt:
        interrupted = True
    for doubt in (*planner.doubts, *impossible_predictions(found)):
        yield f"\n{doubt[0].upper()}{doubt[1:]}."
    for total in dict.fromkeys(p.grid.ranks for p in found):
        of_these = [p for p in found if p.grid.ranks == total]
        yield "\n" + advice(of_these, alone[0], at_best, settings)
    if interrupted:
        rest = "the plan was interrupted: this is the best of the rows that it has"
        yield f"\n{rest}"
        raise StoppedError(rest)


def _at_best(
    planner: Planner, alone: Sequence[Prediction], totals: Iterable[int]
) -> dict[int, float]:
    """Number of ranks -> samples a second of data parallelism alone, where it can be."""
    (base,) = [p for p in alone if p.recipe == BASE]
    found: dict[int, float] = {}
    for n in totals:
        if 1 < n <= planner.size:
            with suppress(ValueError):  # a share of so few samples cannot be timed
                found[n] = data_parallel(planner, base, n)
    return found


def impossible_predictions(predictions: Sequence[Prediction]) -> Iterator[str]:
    """A sentence if predictions gain more than their number of ranks, which cannot be."""
    if wrong := [p for p in predictions if p.impossible]:
        worst = max(wrong, key=lambda p: p.speed_up / p.grid.ranks)
        yield (
            f"{worst.recipe.name} on {worst.grid.ranks} ranks is predicted to be "
            f"{worst.speed_up:.2f} times as fast as one rank, which cannot be: the times of single "
            "units were measured at another speed of the machine; measure again on a quiet one"
        )


def _refuse(settings: Config) -> None:
    """ValueError for a setting that has no effect on a plan."""
    check_command("plan", settings)
    refuse_rounds(settings, "a plan compares rounds and --micro-batches of its own")


def data_parallel(planner: Planner, base: Prediction, ranks: int) -> float:
    """Samples a second of replicas that overlap one all-reduce with their backward passes.

    What a plain loop, `base`, does besides its passes (its optimizer's step), each replica does.
    """
    size, share = planner.size, ceil(planner.size / ranks)
    whole, network = planner.blocks(1), planner.network
    passes = size * sum(map(sum, planner.subject.costs(whole, size)))
    rest = max(0.0, size / base.images_per_second - passes)
    costs = planner.subject.costs(whole, share)
    forward, backward = (share * sum(way) for way in zip(*costs, strict=True))
    trained = [p for p in planner.model.parameters() if p.requires_grad]
    P = network.peers_per_host(Place(replicas=ranks), "chain")
    reduced = sum(network.sum_seconds(sum(p.nbytes for p in trained), ranks, P))
    return float(size / (rest + forward + max(backward, reduced)))


_HEAD = """\
| blocks x replicas | | {samples}/s | epoch | speed-up | by progress | idle share \
| KB sent / sample | memory a rank |
|---|---|---|---|---|---|---|---|---|"""


def row(p: Prediction, epoch: int, alone: float) -> str:
    """A prediction's row of the table, in Markdown.

    An epoch has `epoch` samples, of which the fastest way on one rank makes `alone` a second.
    """
    idle = f"{min(p.idle_share):.0%}-{max(p.idle_share):.0%}"
    worth = "-" if p.progress is None else f"{p.progress / alone:.2f}"
    shape = f"{p.blocks} x {p.replicas}" if p.replicas > 1 else f"{p.blocks}"
    gain = f"{p.speed_up:.2f}{', cannot be' * p.impossible}{_after_comma(p.waste)}"
    return (
        f"| {shape} | {p.recipe.name} | {p.images_per_second:.0f} "
        f"| {epoch / p.images_per_second:.3g} s "
        f"| {gain} | {worth} | {idle} "
        f"| {p.bytes_per_image / 1e3:.1f} | {max(p.memory_bytes) / 1e6:.0f} MB |"
    )


def data_parallel_row(ranks: int, rate: float, epoch: int, alone: float) -> str:
    """That of data parallelism alone, by `data_parallel`."""
    gain = f"{rate / alone:.2f}"
    return (
        f"| 1 x {ranks} | torch DistributedDataParallel | {rate:.0f} | {epoch / rate:.3g} s "
        f"| {gain}{_after_comma(waste(rate / alone, ranks))} | {gain} | | | |"
    )


def _after_comma(text: str) -> str:
    return f", {text}" if text else ""


def advice(
    predictions: Sequence[Prediction],
    alone: Prediction,
    replicas: Mapping[int, float],
    settings: Config,
) -> str:
    """The command that reaches an accuracy first on so many ranks, and how far ahead it is.

    Before it, where `alone`, the fastest way on one rank, is faster, what to do instead.
    """
    said = f"{verdict(predictions, replicas)}\n{command(best(predictions), settings)}"
    if stay := advice_to_stay(predictions, alone):
        return f"{stay}\n{command(alone, settings)}\n\n{said}"
    return said


def advice_to_stay(predictions: Sequence[Prediction], alone: Prediction) -> str:
    """A sentence if one rank is faster than all ways on several ranks; else empty."""
    chosen = best(predictions)
    if chosen.grid.ranks == 1 or chosen.worth >= alone.worth:
        return ""
    return (
        f"stay on one rank: {alone.recipe.name} is {alone.worth / chosen.worth:.2f} times as fast "
        f"as {chosen.recipe.name} on {chosen.grid.ranks} ranks"
    )


def verdict(predictions: Sequence[Prediction], replicas: Mapping[int, float]) -> str:
    """The best way on a number of ranks, and how far it is ahead of a pipeline and of replicas."""
    chosen = best(predictions)
    count, made = chosen.grid.ranks, chosen.worth
    said = f"{chosen.recipe.name} on {count} rank{'s' * (count > 1)}{_after_comma(chosen.waste)}"
    if any(p.grid != chosen.grid for p in predictions):
        said += f" (--blocks {chosen.blocks} --replicas {chosen.replicas})"
    pipelines = [p for p in predictions if p.recipe.solver.exact and p.blocks > 1]
    if pipelines and chosen is not (flushed := best(pipelines)):
        said += f", {made / (flushed.worth or made):.2f} times the best flushed pipeline"
    if (rate := replicas.get(count, 0.0)) > made:
        said += f"; data parallelism would at best be {rate / made:.2f} times as fast as that"
    elif rate:
        said += f", {made / rate:.2f} times data parallelism"
    return said


def command(chosen: Prediction, settings: Config) -> str:
    """The command that trains by a prediction's recipe."""
    names = ",".join(f'"{cut}"' for cut in chosen.cuts)
    ranks = chosen.grid.ranks
    start = f"mpirun -n {ranks} hybrid train" if ranks > 1 else "hybrid train --blocks 1"
    return (
        f"{start} --model {settings.model.name} "
        f"--data {settings.data.name} --batch-size {settings.train.batch_size} "
        + (f"--loss {loss} " if (loss := settings.train.loss) != TrainSettings().loss else "")
        + (f"--blocks {chosen.blocks} --replicas {chosen.replicas} " if chosen.replicas > 1 else "")
        + f"{chosen.recipe.flags()}"
        + (f" --set 'split.cuts=[{names}]'" if names else "")
        + "".join(f" --set {quote(given)}" for given in _given(settings, chosen))
    )


def _given(settings: Config, chosen: Prediction) -> Iterator[str]:
    """The settings that were given beside the recipe, as section.key=value."""
    plain, side = resolve({}).model_dump(), settings.split.side_by_side
    if (limit := settings.rounds.memory_gb) != plain["rounds"]["memory_gb"]:
        yield f"rounds.memory_gb={limit:g}"
    if chosen.replicas > 1 and side != plain["split"]["side_by_side"]:
        yield f"split.side_by_side={side}"
    for section in (
        *("model", "data", "optimizer", "schedule", "delay", "train", "sampler", "checkpoint"),
    ):
        asked: Mapping[str, Any] = settings.model_dump()[section]
        for key, value in asked.items():
            dotted = f"{section}.{key}"
            if value is None or value == plain[section].get(key) or dotted in _FLAGS:
                continue
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for inner, v in entries:
                yield f"{dotted}{'.' * bool(inner)}{inner}={json.dumps(v) if v != str(v) else v}"
