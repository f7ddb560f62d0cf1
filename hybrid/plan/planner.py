"""What a cluster would do: every recipe at every number of blocks, on virtual links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import torch

from hybrid.bench.measure import CPU, still_batches
from hybrid.bench.recipes import OwnContender, Recipe, recipes
from hybrid.cuts.balance import balanced_starts
from hybrid.cuts.costs import measured_costs
from hybrid.cuts.partition import Blocks, split
from hybrid.data import Dataset
from hybrid.links import Network, RankLinks, run_virtual
from hybrid.links.virtual import VirtualLinks
from hybrid.models import Chain, units
from hybrid.plan.memory import Memory
from hybrid.plan.standin import clocked, stand_in
from hybrid.ranks import launch
from hybrid.rounds import optimisers
from hybrid.settings import methods
from hybrid.settings.config import Config
from solvers import Batch, Solver, registry
from solvers.passes.pipeline import Cost, Gaps, fit
from solvers.passes.wire import Wire, WireFormat

FILL_WORTH, SWEEP_WORTH = 0.35, 0.6
"""Progress of local work over that of exact steps on as many images: in gaps, and in sweeps.

Measured with tuned learning rates: docs/benchmarks/README.md, "What a sweep is worth".
"""

NARROW: tuple[WireFormat, ...] = ("bfloat16", "int8")
NARROWER = 1.05
"""What messages of fewer bits must gain to be advised."""

Say = Callable[[str], None]


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
    batch_size: int
    gaps: list[Gaps] = field(default_factory=list)

    @property
    def progress(self) -> float | None:
        """Images a second, each counted as what it is worth; None where that is not measured."""
        own = self.recipe.solver.progress(self.blocks, self.batch_size)
        if self.recipe.solver.alternates:
            own = 1 + (FILL_WORTH if self.recipe.fill else SWEEP_WORTH) * self.local_share
        return None if own is None else own * self.images_per_second


def best(predictions: Sequence[Prediction]) -> Prediction:
    """What makes most progress a second."""
    return max(predictions, key=lambda p: p.progress or 0.0)


class Planner:
    """Predicts from the measured time of every unit: the rest runs, on virtual links."""

    def __init__(
        self,
        settings: Config,
        model: Chain,
        data: Dataset,
        network: Network,
        say: Say = lambda text: None,
    ) -> None:
        self.settings, self.network, self._say = settings, network, say
        self.model, self.data = model.to(memory_format=torch.channels_last), data  # type: ignore[call-overload]
        self.threads = settings.train.threads or 1
        launch.keep_memory()
        torch.set_num_threads(self.threads)
        self.size = settings.train.batch_size
        self._table: dict[int, list[Cost]] = {}
        copies = optimisers.copies(settings.optimiser) + (settings.train.ema > 0)
        self._memory = Memory(self.model, self.size, copies)

    def measure(self, *sizes: int) -> None:
        """Time every unit's passes over so many samples, unless that is done."""
        for n in sizes:
            if n not in self._table:
                self._say(f"measuring passes over {n} images")
                x = torch.randn(n, *self.model.input_shape).to(memory_format=torch.channels_last)
                self._table[n] = measured_costs(self.model, units(self.model), x)

    def costs(self, samples: int) -> list[Cost]:
        """Seconds of every unit and one sample, in passes over so many."""
        self.measure(samples)
        return self._table[samples]

    def blocks(self, count: int, samples: int = 0) -> Blocks:
        """The model in `count` blocks, balanced by the time of passes over so many samples."""
        costs = self.costs(samples or ceil(self.size / 4))
        starts = balanced_starts([sum(cost) for cost in costs], count)
        return replace(split(self.model, count, balance="even"), starts=starts, costs=costs)

    def predictions(
        self, counts: Sequence[int], micro_batches: Sequence[int], cuts: Sequence[str] = ()
    ) -> list[Prediction]:
        """Every recipe at every number of blocks, over `cuts` or balanced by measured cost."""
        if max(counts) > (most := len(units(self.model))):
            raise ValueError(
                f"--blocks asks for {max(counts)} blocks, the model has {most} units: ask for at "
                f"most {most}, or take a deeper model"
            )
        made = []
        exact = methods.correction(self.settings)
        for count in counts:
            blocks = self.blocks(count, ceil(self.size / micro_batches[0]))
            blocks.starts = split(self.model, cuts=cuts).starts if cuts else blocks.starts
            here = []
            for recipe in recipes(micro_batches, exact, self.solvers()):
                self._say(f"{count} blocks: {recipe.name}")
                here.append(self.predict(blocks, recipe))
            made += here
            known = [p for p in here if p.progress is not None and count > 1]
            for name in dict.fromkeys(p.recipe.solver.name for p in known):
                own = best([p for p in known if p.recipe.solver.name == name])
                made += self._narrower(blocks, own)
        return made

    def _narrower(self, blocks: Blocks, chosen: Prediction) -> Iterator[Prediction]:
        """A recipe with messages of fewer bits, as long as each format gains `NARROWER` times."""
        for number_format in NARROW:
            recipe = chosen.recipe.narrowed(number_format)
            if recipe is None:
                continue
            self._say(f"{len(blocks)} blocks: {recipe.name}")
            found = self.predict(blocks, recipe)
            if (found.progress or 0.0) < NARROWER * (chosen.progress or 0.0):
                return
            yield found
            chosen = found

    def solvers(self) -> list[Solver]:
        """The one that is asked for, and those whose steps are known to be worth something."""
        asked = methods.solver(self.settings)
        others = [registry.solver_class(name)() for name in registry.OWN if name != asked.name]
        known = [solver for solver in others if solver.progress(2, self.size) is not None]
        return [asked, *known]

    def predict(
        self, blocks: Blocks, recipe: Recipe, steps: int = 4, real: bool = False
    ) -> Prediction:
        """Time `steps` mini-batches (whole windows) after as many to warm up.

        Units only take the time they were measured to need, unless they shall be `real`. A solver
        that trains alone has a pipeline that every report empties: it is timed over as many and
        four times as many, which gives the time of those between two reports.
        """
        size = self.size
        steps = recipe.window if recipe.windowed else steps
        batches = still_batches(self.data, size, steps, CPU)
        delay = recipe.solver.delay(0, len(blocks))
        warm_up = max(steps, ceil(delay / recipe.solver.parts(size)))
        gaps = self.gaps(blocks, recipe) if recipe.fill else []
        if not real:
            self.measure(size, ceil(size / recipe.solver.parts(size)))
            self.measure(ceil(size / recipe.serial.micro_batches))
        timed = blocks if real else self._stand_in(blocks)

        def program(links: RankLinks) -> dict[str, float]:
            row = OwnContender(recipe, timed, links, gaps, self.settings)
            assert isinstance(links, VirtualLinks)
            clocked(row.block.module, links)
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
        sent = sum(r["sent"] for r in ranks)
        memory = self._memory.needed(blocks, recipe, gaps)
        told = images / elapsed, float(local), idle, sent / images, memory, size, gaps
        return Prediction(len(blocks), recipe, blocks.cuts, *told)

    def _stand_in(self, blocks: Blocks) -> Blocks:
        made = stand_in(self.model, self._table)
        return replace(blocks, model=made, units=units(made))

    def gaps(self, blocks: Blocks, recipe: Recipe) -> list[Gaps]:
        """The local work that fits, by measured costs and this network."""
        exact = recipe.serial
        wire = Wire(exact.messages, exact.filter)
        rate = self.network.bytes_per_second
        shapes = blocks.cut_shapes(torch.zeros(1, *self.model.input_shape))
        transfers = [wire.bytes_per_sample(shape) / rate for shape in shapes]
        size = self.size
        costs = self.costs(ceil(size / exact.micro_batches))
        return fit(replace(blocks, costs=costs).block_costs(), size, exact.micro_batches, transfers)


def _timed(row: OwnContender, links: RankLinks, batches: Sequence[Batch]) -> dict[str, float]:
    """One rank's share of training on `batches`; all begin together."""
    links.all_gather(None)
    names, before = ("seconds", "sent", "waited"), (links.now(), *row.spent())
    row.train(batches)
    after = links.now(), *row.spent()
    found = {k: b - a for k, a, b in zip(names, before, after, strict=True)}
    return {**found, "images": sum(map(len, batches))}
