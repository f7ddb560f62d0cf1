"""What a cluster would do: every recipe at every number of blocks, timed on virtual links."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from hybrid.bench.measure import CPU, still_batches
from hybrid.bench.recipes import BASE, OwnContender, Recipe, recipes
from hybrid.cuts.costs import seconds, unit_costs
from hybrid.cuts.partition import Blocks, balanced_starts, default_sample, split
from hybrid.data import Dataset
from hybrid.links import Network, RankLinks, run_virtual
from hybrid.models import Chain, units
from hybrid.ranks import launch
from hybrid.runs import build
from hybrid.settings import methods
from hybrid.settings.config import Config
from solvers import Batch
from solvers.passes.pipeline import Gaps, fit
from solvers.passes.wire import Wire

FILL_WORTH, SWEEP_WORTH = 0.35, 0.6
"""Progress of local work over that of exact steps on as many images: in gaps, and in sweeps.

Measured with tuned learning rates: docs/benchmarks/README.md, "What a sweep is worth".
"""


@dataclass
class Prediction:
    """One recipe at one number of blocks. Lists are per rank."""

    blocks: int
    recipe: Recipe
    cuts: list[str]
    images_per_second: float
    local_share: float
    """Images of local steps over images of exact steps."""
    idle_share: list[float]
    bytes_per_image: float
    memory_bytes: list[int]
    gaps: list[Gaps] = field(default_factory=list)

    @property
    def progress(self) -> float:
        """Images a second, an image of local work counted as what it is worth."""
        worth = FILL_WORTH if self.recipe.fill else SWEEP_WORTH
        return self.images_per_second * (1 + worth * self.local_share)


class Planner:
    """Predicts from runs of a few mini-batches, K blocks in turn on this machine."""

    def __init__(self, settings: Config, model: Chain, data: Dataset, network: Network) -> None:
        self.settings, self.network = settings, network
        self.model, self.data = model.to(memory_format=torch.channels_last), data  # type: ignore[call-overload]
        self.threads = settings.train.threads or 1
        launch.keep_memory()
        torch.set_num_threads(self.threads)
        self.costs = unit_costs(self.model, units(model), default_sample(model, None), seconds)
        """Seconds of every unit and one sample, measured here."""

    def blocks(self, count: int) -> Blocks:
        """The model in `count` blocks, balanced by the measured costs."""
        blocks = split(self.model, count, balance="even")
        starts = balanced_starts([sum(cost) for cost in self.costs], count)
        return replace(blocks, starts=starts, costs=self.costs)

    def predictions(
        self, counts: Sequence[int], micro_batches: Sequence[int], say: Callable[[str], None]
    ) -> list[Prediction]:
        """Every recipe at every number of blocks, over cuts balanced by measured cost."""
        if max(counts) > (most := len(units(self.model))):
            raise ValueError(
                f"--blocks asks for {max(counts)} blocks, the model has {most} units: ask for at "
                f"most {most}, or take a deeper model"
            )
        solver, exact = methods.solver(self.settings), methods.correction(self.settings)
        made = []
        for count in counts:
            blocks = self.blocks(count)
            for recipe in recipes(micro_batches, exact, [solver]):
                say(f"{count} blocks: {recipe.name}")
                made.append(self.predict(blocks, recipe))
        return made

    def predict(self, blocks: Blocks, recipe: Recipe, steps: int = 4) -> Prediction:
        """Time `steps` mini-batches (whole windows) after as many to warm up.

        A solver that trains alone has a pipeline that every report empties: it is timed over
        as many and four times as many, which gives the time of those between two reports.
        """
        size = self.settings.train.batch_size
        steps = recipe.window if recipe.windowed else steps
        batches = still_batches(self.data, size, steps, CPU)
        warm_up = max(steps, recipe.solver.delay(0, len(blocks)))
        gaps = self.gaps(blocks, recipe) if recipe.fill else []

        def program(links: RankLinks) -> dict[str, float]:
            row = OwnContender(recipe, blocks, links, gaps, self.settings)
            row.train(still_batches(self.data, size, warm_up, CPU))
            found = _timed(row, links, batches)
            if not recipe.alone:
                return found
            every = self.settings.train.report_every * links.size
            more = (every - len(batches)) / (3 * len(batches))
            longer = _timed(row, links, batches * 4)
            return {k: v + more * (longer[k] - v) for k, v in found.items()}

        ranks = run_virtual(len(blocks), program, self.network, self.threads)
        elapsed, images = (max(r[of] for r in ranks) for of in ("seconds", "images"))
        swept = recipe.sweeps if recipe.windowed else 0
        local = sum(sum(g) for g in gaps) / (len(gaps) * size) if gaps else swept
        idle = [max(0.0, r["waited"]) / elapsed for r in ranks]
        sent, memory = sum(r["sent"] for r in ranks), self.memory(blocks, recipe, gaps)
        told = images / elapsed, float(local), idle, sent / images, memory, gaps
        return Prediction(len(blocks), recipe, blocks.cuts, *told)

    def gaps(self, blocks: Blocks, recipe: Recipe) -> list[Gaps]:
        """The local work that fits, by measured costs and this network."""
        exact = recipe.serial
        wire = Wire(exact.messages, exact.filter)
        rate = self.network.bytes_per_second
        shapes = blocks.cut_shapes(torch.zeros(1, *self.model.input_shape))
        transfers = [wire.bytes_per_sample(shape) / rate for shape in shapes]
        size = self.settings.train.batch_size
        costs = replace(blocks, costs=self.costs).block_costs()
        return fit(costs, size, exact.micro_batches, transfers)

    def memory(self, blocks: Blocks, recipe: Recipe, gaps: Sequence[Gaps]) -> list[int]:
        """Bytes a rank: weights, their optimiser, graphs alive at once, auxiliary variables."""
        size, exact = self.settings.train.batch_size, recipe.serial
        m, K = exact.micro_batches, len(blocks)
        image = torch.zeros(1, *self.model.input_shape)
        shapes = blocks.cut_shapes(image)
        method = recipe.method(blocks, shapes, size, gaps)
        share = -(-size // m)
        x = image.repeat(share, 1, 1, 1).to(memory_format=torch.channels_last)
        copies = 4 if self.settings.optimiser.name == "adamw" else 3
        needed = []
        for k in range(K):
            module = blocks.module(k)
            weights = sum(p.numel() * p.element_size() for p in module.parameters())
            arriving = torch.zeros(size, *x.shape[1:]).to(memory_format=torch.channels_last)
            arriving.requires_grad_(k > 0)
            x, graph = _saved_bytes(module, x)
            a_sample = graph / share
            flying = m if recipe.fill and k < K - 1 else min(m, K - k)
            if exact.recompute:
                lam = shapes[k - 1] if k else tuple(self.model.input_shape)
                graph, flying = graph + (flying - 1) * prod(lam) * 4 * share, 1
            live = flying * graph
            if recipe.alone:
                live = recipe.solver.held_bytes(module, arriving, k, K, _graph_bytes)
            if recipe.windowed:
                live = max(live, round(size * a_sample))
            if recipe.fill:
                live += round(min(max(gaps[k]), size) * a_sample)
            needed.append(copies * weights + live + method.memory(k))
        return needed


def report(
    settings: Config,
    counts: Sequence[int],
    micro_batches: Sequence[int],
    say: Callable[[str], None],
) -> str:
    """The table of all predictions, and the commands to take."""
    images, _ = build.data_sets(settings.data)
    wire = settings.links
    network = Network(wire.gigabits_per_second * 1e9 / 8, wire.latency_microseconds * 1e-6)
    planner = Planner(settings, build.model(settings, images), images, network)
    base = planner.predict(split(planner.model, 1), BASE)
    found = planner.predictions(counts, micro_batches, say)
    return f"{table(base, found, len(images))}\n\n{advice(found, settings)}"


def table(base: Prediction, predictions: Sequence[Prediction], epoch_images: int) -> str:
    """Markdown: a row each."""
    lines = [
        "| blocks | | images/s | epoch | speed-up | with local steps | idle share "
        "| KB sent an image | memory a rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in [base, *predictions]:
        idle = f"{min(p.idle_share):.0%}-{max(p.idle_share):.0%}"
        lines.append(
            f"| {p.blocks} | {p.recipe.name} | {p.images_per_second:.0f} "
            f"| {epoch_images / p.images_per_second:.1f} s "
            f"| {p.images_per_second / base.images_per_second:.2f} "
            f"| {p.progress / base.progress:.2f} | {idle} "
            f"| {p.bytes_per_image / 1e3:.1f} | {max(p.memory_bytes) / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


def advice(predictions: Sequence[Prediction], settings: Config) -> str:
    """The command that trains fastest at each number of blocks."""
    lines = []
    for count in dict.fromkeys(p.blocks for p in predictions):
        best = max((p for p in predictions if p.blocks == count), key=lambda p: p.progress)
        names = ",".join(f'"{cut}"' for cut in best.cuts)
        pairs = ",".join(f"[{g.middle},{g.turn}]" for g in best.gaps)
        lines.append(
            f"mpirun -n {count} hybrid train --model {settings.model.name} "
            f"--data {settings.data.name} --batch-size {settings.train.batch_size} "
            f"{best.recipe.flags()}"
            + (f" --set 'split.cuts=[{names}]'" if names else "")
            + (f" --set 'rounds.gaps=[{pairs}]'" if pairs else "")
        )
    return "\n".join(lines)


def _timed(row: OwnContender, links: RankLinks, batches: Sequence[Batch]) -> dict[str, float]:
    """One rank's share of training on `batches`; all begin together."""
    links.all_gather(None)
    names, before = ("seconds", "sent", "waited"), (links.now(), *row.spent())
    row.train(batches)
    after = links.now(), *row.spent()
    found = {k: b - a for k, a, b in zip(names, before, after, strict=True)}
    return {**found, "images": sum(map(len, batches))}


def _graph_bytes(module: torch.nn.Module, x: Tensor) -> int:
    with torch.enable_grad():
        return _saved_bytes(module, x)[1]


def _saved_bytes(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The module's output, and what autograd keeps for its backward pass, parameters left out."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x.detach().requires_grad_(x.requires_grad))
    return out.detach().requires_grad_(), sum(kept.values())
