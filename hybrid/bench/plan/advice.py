"""The text of a plan: a table of all predictions, and a command for each number of ranks."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from shlex import quote

from hybrid.bench.plan.device import Device
from hybrid.bench.plan.planner import Planner
from hybrid.bench.plan.prediction import Prediction, best
from hybrid.bench.plan.timed_network import Say
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.method.make_method import check_replicas
from hybrid.ranks.machines import MEASURED, NAMES, check_machines
from hybrid.ranks.progress import Bar
from hybrid.settings.config import Config
from hybrid.settings.resolve import check_command, refuse_rounds, resolve
from hybrid.training import build


def report(
    settings: Config,
    counts: Sequence[int] | None,
    ranks: Sequence[int],
    micro_batches: Sequence[int],
    say: Say,
    device: Device | None,
    bar: Bar,
) -> Iterator[str]:
    """Yield the rows of predictions as they are made, then the recommended commands.

    Predicted are `counts` of blocks (None: those of the cuts, or 2 and 4) with the settings'
    replicas, or every grid of each number of `ranks`. A rank is like this machine, or a device.
    """
    check_command("plan", settings)
    refuse_rounds(settings, "a plan compares rounds and --micro-batches of its own")
    if MEASURED in (settings.split.speeds, settings.split.memory):
        raise ValueError(
            "split.speeds or split.memory is measured, and a plan has no ranks: give it numbers"
        )
    cuts, R, K = settings.split.cuts, settings.split.replicas or 1, settings.split.count
    check_machines(settings.split.model_copy(update={"blocks": K}))
    if counts is None and not ranks:
        counts = [K] if K else [2, 4]
    grids = [Grid(count, R) for count in counts or ()]
    if K and (ranks or any(grid.blocks != K for grid in grids)):
        name = next(n for n in ("cuts", *NAMES) if getattr(settings.split, n))
        raise ValueError(f"split.{name} is of {K} blocks: leave it out, or --blocks and --ranks")
    if R == 1 and not ranks:
        check_replicas(build.build_options(settings))

    def tell(text: str) -> None:
        bar.update(text=text, now=True) if bar.shown else say(text)

    data, _ = build.load_data_sets(settings.data, settings.train.loss)
    build.take_batch_size(settings, data)
    model = build.build_network(settings, data)
    planner = Planner(settings, model, data, LinkSpeed.of(settings.links), say, device, tell)
    grids += [grid for count in ranks for grid in planner.grids(count)]
    predictions = planner.predictions(grids, micro_batches, cuts)
    first = next(predictions)  # if nothing can be planned, it says so before a table
    rows = [first]
    alone = planner.on_one_rank(micro_batches)
    undivided = _data_parallel(planner, grids, micro_batches)
    epoch, rate = len(data), alone[0].images_per_second
    yield from _HEAD.splitlines()
    yield from (row(p, epoch, rate) for p in (*alone, *undivided, first))
    for p in predictions:
        rows.append(p)
        yield row(p, epoch, rate)
    for doubt in impossible_predictions(rows):
        yield f"\n{doubt}"
    for total in dict.fromkeys(p.grid.ranks for p in rows):
        of_these = [p for p in rows if p.grid.ranks == total]
        others = [alone[0], *(p for p in undivided if p.grid.ranks == total)]
        yield "\n" + advice(of_these, others, settings)


def _data_parallel(
    planner: Planner, grids: Sequence[Grid], micro_batches: Sequence[int]
) -> list[Prediction]:
    """Predict data parallelism with the undivided network, unless a grid is that already."""
    plans: list[Prediction] = []
    for ranks in dict.fromkeys(grid.ranks for grid in grids):
        whole = Grid(1, ranks)
        if 1 < ranks <= planner.size and whole not in grids:
            with suppress(ValueError):  # such as for a share of too few samples
                plans += planner.predictions([whole], micro_batches)
    return plans


def impossible_predictions(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield a sentence if a predicted speed-up exceeds the number of ranks, which is impossible."""
    if wrong := [p for p in predictions if p.impossible]:
        worst = max(wrong, key=lambda p: p.speed_up / p.grid.ranks)
        yield (
            f"{worst.recipe.name} on {worst.grid.ranks} ranks is predicted to be "
            f"{worst.speed_up:.2f} times as fast as one rank, which cannot be: the times of single "
            "units were measured at another speed of the machine; measure again on a quiet one."
        )


_HEAD = """\
| blocks x replicas | | samples/s | epoch | speed-up | by progress | idle share \
| KB sent / sample | memory a rank |
|---|---|---|---|---|---|---|---|---|"""


def row(p: Prediction, epoch: int, alone: float) -> str:
    """Format a prediction as a Markdown row.

    An epoch has `epoch` samples; the fastest row on one rank trains `alone` of them a second.
    """
    K, R = p.grid
    cells = (
        f"{K} x {R}" if R > 1 else f"{K}",
        p.recipe.name,
        f"{p.images_per_second:.0f}",
        f"{epoch / p.images_per_second:.3g} s",
        f"{p.speed_up:.2f}{', cannot be' * p.impossible}",
        "-" if p.progress is None else f"{p.progress / alone:.2f}",
        f"{min(p.idle_share):.0%}-{max(p.idle_share):.0%}",
        f"{p.bytes_per_image / 1e3:.1f}",
        f"{max(p.memory_bytes) / 1e6:.0f} MB",
    )
    return f"| {' | '.join(cells)} |"


def advice(
    predictions: Sequence[Prediction], others: Sequence[Prediction], settings: Config
) -> str:
    """Recommend the command that first reaches an accuracy on a number of ranks.

    It comes after the commands of `others` that are faster: one rank, the undivided network.
    """
    chosen, lines = best(predictions), []
    count = chosen.grid.ranks
    for other in others:
        ratio = other.worth / (chosen.worth or other.worth)
        if round(ratio, 2) > 1 and other.grid != chosen.grid:
            instead = "do not cut the network" if other.grid.ranks > 1 else "stay on one rank"
            lines.append(
                f"{instead}: {other.recipe.name} on {other.grid} is {ratio:.2f} times as fast as "
                f"{chosen.recipe.name} on {count} ranks\n{command(other, settings)}\n"
            )
    where = f"{count} rank{'s' * (count > 1)}"
    if any(p.grid != chosen.grid for p in predictions):
        where += f" ({_grid_flags(chosen.grid)})"
    lines.append(
        f"fastest to an accuracy: {chosen.recipe.name} on {where}\n{command(chosen, settings)}"
    )
    return "\n".join(lines)


def _grid_flags(grid: Grid) -> str:
    return f"--blocks {grid.blocks} --replicas {grid.replicas}"


def command(chosen: Prediction, settings: Config) -> str:
    """Return the command that trains by a prediction's recipe."""
    ranks, name = chosen.grid.ranks, settings.model.name
    words = [f"mpirun -n {ranks} hybrid train" if ranks > 1 else "hybrid train --blocks 1"]
    words.append(f"--model {name} --data {settings.data.name}")
    words.append(f"--batch-size {settings.train.batch_size}")
    if chosen.grid.replicas > 1:
        words.append(_grid_flags(chosen.grid))
    words.append(chosen.recipe.flags())
    texts = [f"split.cuts={json.dumps(chosen.cuts)}"] if chosen.cuts else []
    if any(map(any, chosen.local_budgets)):
        texts.append(f"rounds.local_budget={json.dumps(chosen.local_budgets)}")
    texts += _changed_settings(settings, chosen.grid.replicas)
    return " ".join([*words, *(f"--set {quote(text)}" for text in texts)])


_CHOSEN = ("solver", "fill", "correction", "rounds", "sync", "split", "links")
"""The sections that a plan decides, except the settings below."""
_USER_CHOICES = ("rounds.memory_gb", "split.inside", "split.side_by_side")
_FLAGS = ("model.name", "data.name", "train.batch_size")


def _changed_settings(settings: Config, replicas: int) -> Iterator[str]:
    """Yield the settings outside the recipe that differ from the defaults, as section.key=value."""
    defaults = resolve({}).model_dump()
    for section, table in settings.model_dump().items():
        for key, value in table.items() if isinstance(table, dict) else ():
            name = f"{section}.{key}"
            decided = name in _FLAGS or (section in _CHOSEN and name not in _USER_CHOICES)
            if decided or (name == "split.side_by_side" and replicas == 1):
                continue
            if value is None or value == defaults[section].get(key):
                continue
            for inner, v in value.items() if isinstance(value, dict) else [("", value)]:
                dotted = f"{name}.{inner}".rstrip(".")
                yield f"{dotted}={v if isinstance(v, str) else json.dumps(v)}"
