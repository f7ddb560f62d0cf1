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


def report(settings: Config, counts: Sequence[int], micro_batches: Sequence[int], say: Say) -> str:
    """The table of all predictions, and the commands to take."""
    images, _ = build.images(settings.data)
    network = Network.asked(settings.links)
    planner = Planner(settings, build.model(settings, images), images, network, say)
    base = planner.predict(split(planner.model, 1), BASE)
    found = planner.predictions(counts, micro_batches)
    replicas = {count: data_parallel(planner, count) for count in counts if count > 1}
    lines = [table(base, found, replicas, len(images))]
    for count in dict.fromkeys(p.blocks for p in found):
        lines.append(advice([p for p in found if p.blocks == count], replicas, settings))
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
        "| blocks | | images/s | epoch | speed-up | by progress | idle share "
        "| KB sent an image | memory a rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    alone = base.images_per_second
    for p in [base, *predictions]:
        idle = f"{min(p.idle_share):.0%}-{max(p.idle_share):.0%}"
        worth = "-" if p.progress is None else f"{p.progress / alone:.2f}"
        lines.append(
            f"| {p.blocks} | {p.recipe.name} | {p.images_per_second:.0f} "
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
    """What is best at one number of blocks, against the flushed pipeline and data parallelism."""
    chosen = best(predictions)
    count, made = chosen.blocks, chosen.progress or 0.0
    said = f"{chosen.recipe.name} on {count} ranks"
    flushed = best([p for p in predictions if p.recipe.solver.exact])
    if chosen is not flushed:
        said += f", {made / (flushed.progress or made):.2f} times the best flushed pipeline"
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
        f"mpirun -n {chosen.blocks} hybrid train --model {settings.model.name} "
        f"--data {settings.data.name} --batch-size {settings.train.batch_size} "
        f"{chosen.recipe.flags()}"
        + (f" --set 'split.cuts=[{names}]'" if names else "")
        + (f" --set 'rounds.gaps=[{pairs}]'" if pairs else "")
    )
