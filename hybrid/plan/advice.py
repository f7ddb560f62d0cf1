"""What a plan says: a table of all predictions, and for every number of ranks the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from hybrid.bench.recipes import BASE
from hybrid.cuts.partition import split
from hybrid.links import Network
from hybrid.plan.planner import Planner, Prediction, Say, best
from hybrid.runs import build
from hybrid.settings.config import Config
from hybrid.training.replicas import Grid


def report(
    settings: Config,
    counts: Sequence[int],
    ranks: Sequence[int],
    micro_batches: Sequence[int],
    say: Say,
) -> str:
    """The table of all predictions, and the commands to take.

    Of `counts` of blocks, on as many ranks for each replica of the settings, or of every grid of
    so many `ranks`.
    """
    images, _ = build.images(settings.data)
    network = Network.asked(settings.links)
    planner = Planner(settings, build.model(settings, images), images, network, say)
    wanted = [Grid(count, settings.split.replicas or 1) for count in counts]
    wanted += [grid for count in ranks for grid in planner.grids(count)]
    found = planner.predictions(wanted, micro_batches)
    base = planner.predict(split(planner.model, 1), BASE)
    totals = dict.fromkeys(p.grid.ranks for p in found)
    replicas = {n: data_parallel(planner, n) for n in totals if 1 < n <= planner.size}
    lines = [table(base, found, replicas, len(images))]
    for total in totals:
        lines.append(advice([p for p in found if p.grid.ranks == total], replicas, settings))
    return "\n\n".join(lines)


def data_parallel(planner: Planner, ranks: int) -> float:
    """Images a second of replicas that overlap a ring all-reduce with their backward passes."""
    share = ceil(planner.size / ranks)
    costs, network = planner.costs(share), planner.network
    forward, backward = (share * sum(way) for way in zip(*costs, strict=True))
    sent = 2 * (ranks - 1) / ranks * sum(p.nbytes for p in planner.model.parameters())
    reduced = sent / network.bytes_per_second + 2 * (ranks - 1) * network.latency_seconds
    return float(planner.size / (forward + max(backward, reduced)))


def table(
    base: Prediction,
    predictions: Sequence[Prediction],
    replicas: Mapping[int, float],
    epoch_images: int,
) -> str:
    """Markdown: a row each."""
    lines = [
        "| blocks x replicas | | images/s | epoch | speed-up | by progress | idle share "
        "| KB sent an image | memory a rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    alone = base.images_per_second
    for p in [base, *predictions]:
        idle = f"{min(p.idle_share):.0%}-{max(p.idle_share):.0%}"
        worth = "-" if p.progress is None else f"{p.progress / alone:.2f}"
        shape = f"{p.blocks} x {p.replicas}" if p.replicas > 1 else f"{p.blocks}"
        lines.append(
            f"| {shape} | {p.recipe.name} | {p.images_per_second:.0f} "
            f"| {epoch_images / p.images_per_second:.1f} s "
            f"| {p.images_per_second / alone:.2f} | {worth} | {idle} "
            f"| {p.bytes_per_image / 1e3:.1f} | {max(p.memory_bytes) / 1e6:.0f} MB |"
        )
    for ranks, rate in replicas.items():
        gain = f"{rate / alone:.2f}"
        lines.append(
            f"| {ranks} replicas | torch DistributedDataParallel | {rate:.0f} "
            f"| {epoch_images / rate:.1f} s | {gain} | {gain} | | | |"
        )
    return "\n".join(lines)


def advice(
    predictions: Sequence[Prediction], replicas: Mapping[int, float], settings: Config
) -> str:
    """The command that reaches an accuracy first on so many ranks, and how far ahead it is."""
    return f"{spoken(predictions, replicas)}\n{command(best(predictions), settings)}"


def spoken(predictions: Sequence[Prediction], replicas: Mapping[int, float]) -> str:
    """What is best on one number of ranks, against the flushed pipeline and data parallelism."""
    chosen = best(predictions)
    count, made = chosen.grid.ranks, chosen.worth
    said = f"{chosen.recipe.name} on {count} ranks"
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
    """What gives a recipe to mpirun."""
    names = ",".join(f'"{cut}"' for cut in chosen.cuts)
    pairs = ",".join(f"[{g.middle},{g.turn}]" for g in chosen.gaps)
    return (
        f"mpirun -n {chosen.grid.ranks} hybrid train --model {settings.model.name} "
        f"--data {settings.data.name} --batch-size {settings.train.batch_size} "
        + (f"--blocks {chosen.blocks} --replicas {chosen.replicas} " if chosen.replicas > 1 else "")
        + f"{chosen.recipe.flags()}"
        + (f" --set 'split.cuts=[{names}]'" if names else "")
        + (f" --set 'rounds.gaps=[{pairs}]'" if pairs else "")
    )
