"""One rank's training and how far it has come: everything that a checkpoint restores."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.data import Data, Dataset
from hybrid.folder import checkpoint
from hybrid.folder.manifest import RunPosition, check
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.method.optimizers import peak_rate
from hybrid.method.options import Options
from hybrid.method.schedule import Plateau, make_schedule
from hybrid.networks.units import BlockModule
from hybrid.proof.proof import is_checked
from hybrid.ranks import launch
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.rounds.epoch_windows import BN_BATCHES
from hybrid.rounds.evaluation import check_samples
from hybrid.rounds.phase_report import DivergedError, PhaseReport
from hybrid.rounds.trace import Trace
from hybrid.settings.selection import check_metric
from hybrid.solvers.checks.mean_check import MeanCheck
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.local_work.work import STORED_BATCHES
from hybrid.solvers.numerics.optimizer_state import optimizer_state
from hybrid.solvers.state import Stateful, Tensors
from hybrid.solvers.windows import Window
from hybrid.training.checkpointing import CountedAttributes, Position, StateFiles, check_same_run


def stored_part(options: Options) -> int:
    """The samples of a micro-batch of the run that is resumed; 0 without one."""
    if not options.resume or options.out is None:
        return 0
    found = checkpoint.complete(options.out / "checkpoints")
    return int(checkpoint.read_manifest(found[-1])["part"]) if found else 0


class RankTraining:
    """Made at the start of a run, and anew by every roll-back. All ranks call its methods.

    Without `callbacks` theirs stay as they are. Raises ValueError if the run folder could not keep
    all of the optimizer's state.
    """

    def __init__(
        self, method: Method, links: RankLinks, data: Data, trace: Trace, callbacks: Stateful | None
    ) -> None:
        options = self.options = method.options
        self.method, self.links = method, links
        self.callbacks, self.num_samples = callbacks, len(data)
        train, place = options.train, links.place
        self.block = method.block(links)
        if self.block.last and not self.block.norms and is_checked(method, data):
            network = method.problem.objectives.network
            self.block.check = MeanCheck(self.block, method.steps, network)
        if self.block.sync is not None:
            self.block.sync.copy_first_replica()
        self.left_out = self._find_left_out()
        """Frozen weights that checkpoints leave out: the network that the user gives has them."""
        exact = self.block.optimizers["exact"]
        if options.out is not None:
            self.block.watch = trace.span
            for group in exact.param_groups:
                optimizer_state(exact, group["params"][0])
        module = self.block.module
        assert isinstance(module, BlockModule)
        self.attributes = CountedAttributes(module, links)
        self.rounds = method.start(self.block, links, trace)
        self.sampler = BatchSampler(options.sampler, data, train.seed, train.batch_size, links)
        self.peak = peak_rate(exact)
        """The learning rate that the schedule starts from."""
        common = options.schedule, self.peak, method.steps, train.epochs
        schedule = method.rates or make_schedule(*common, method.user_optimizer or exact)
        self.plateau = schedule if isinstance(schedule, Plateau) else None
        """The schedule, if it follows a measured metric."""
        if self.plateau is not None:
            measured = method.problem.objectives.deciding.metrics
            check_metric("schedule.metric", self.plateau.metric, measured)
        here, mix = data, method.problem.objectives.mix
        if isinstance(data, Dataset) and mix is None:  # which would get images of a GPU
            here = data.on(self.block.device, self.block.first, self.block.last)
        self.windows = method.windows(here, schedule, self.sampler, place)
        data.keep(self._num_asked_again() * train.batch_size)
        self.position = Position(residual=[0.0] * (links.size - 1))
        self.files = StateFiles(place, method.problem.blocks)

    def groups(self) -> Iterator[list[tuple[Window, Window]]]:
        """The windows of the rest of the epoch, in groups that are reported together.

        Where a report empties a pipeline, reports are K times as far apart, but no farther than
        the lag of a sampler that learns from them.
        """
        if self.block.freezing is not None:
            with self.links.agreement():
                self.block.freezing.begin(self.position.epoch)
        return self.windows.groups(self.position.epoch, self.position.step, self._report_every())

    def _report_every(self) -> int:
        flushed = self.rounds.alternates or self.method.solver.exact
        every = self.options.train.report_every * (1 if flushed else self.links.size)
        lag = getattr(self.options.sampler, "lag", None)
        return every if lag is None else min(every, max(1, lag - self.method.setup.window + 1))

    def _num_asked_again(self) -> int:
        """How many of the last mini-batches may be asked for again, or by another block.

        They belong to a window that is swept, are under way between blocks, have records for local
        work, or recalibrate BatchNorm. Ranks on threads may be as far apart as two reports.
        """
        method = self.method
        stored = STORED_BATCHES if method.setup.local_work else 1
        count = 2 * self.links.size + max(stored, method.setup.stored_batches)
        if launch.communicator() is None:
            count += method.setup.window + self._report_every()
        return max(count, BN_BATCHES if method.problem.normed else 0)

    def run(self, pairs: Sequence[tuple[Window, Window]]) -> list[PhaseReport]:
        """Run a round for each pair of windows, and add to the sums."""
        at, traffic = self.position, self.links.traffic
        waited, sent = traffic.total_waiting, traffic.total_bytes
        steps = sum(len(trained.batches) for trained, _ in pairs)
        ends = at.step + steps == (at.epoch + 1) * self.method.steps
        bn_recalibration = self.windows.bn_recalibration(at.epoch) if ends else None
        reports = self.rounds.run(pairs, at.step, at.epoch, bn_recalibration)
        self.sampler.take_losses(self.rounds.losses)
        at.step += steps
        at.add_loss(reports[0].loss, reports[0].samples)
        at.residual = reports[-1].residual or [0.0] * (self.links.size - 1)
        at.totals["images"] += steps * self.options.train.batch_size
        at.totals["idle_seconds"] += traffic.total_waiting - waited
        at.totals["bytes_sent"] += traffic.total_bytes - sent
        at.totals["local_steps"] += self.rounds.local_steps
        at.totals["local_seconds"] += self.rounds.local_seconds
        for report in reports:
            at.totals[f"{report.phase}_seconds"] += report.seconds
        return reports

    def learning_rate(self, report: PhaseReport) -> float:
        """The learning rate of the last step of a phase that has just ended."""
        local = not self.rounds.alternates and report.phase == "parallel"
        rate = float(self.windows.schedule(self.position.step - 1))
        return rate * self.block.rates["local" if local else "exact"]

    def collect(self) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """A checkpoint's files of states, and its manifest."""
        files, shared = self.files.collect(self._parts(self._kinds))
        left_out = self.links.gather({} if self.links.place.replica else self.left_out) or ()
        manifest = {
            **self.options.names,
            **self._kinds,
            **vars(self.position),
            "tensors": len(self.method.problem.blocks.model.state_dict()),
            "samples": self.num_samples,
            "steps_per_epoch": self.method.steps,
            "seed": self.method.setup.seed,
            "window": self.method.setup.window,
            "cuts": self.method.problem.blocks.cuts,
            "replicas": self.method.setup.replicas,
            "carried_as": self.method.carried_layout,
            "local_budget": [list(pair) for pair in self.rounds.local_budgets],
            "shared": shared,
            "frozen": {name: each for rank in left_out for name, each in rank.items()},
            "totals": self.links.gather(dict(self.position.totals)),
        }
        return files, manifest

    def collect_units(self) -> dict[str, Tensors]:
        """A checkpoint's files of weights; the first replica alone writes them."""
        place, blocks = self.links.place, self.method.problem.blocks
        units = [] if place.replica else blocks.units_of(place.block)
        return {
            unit.name: checkpoint.tensors_of(unit, self.block.optimizers, self.left_out)
            for unit in units
        }

    def _find_left_out(self) -> checkpoint.References:
        """What is frozen for the whole run, as the network has it before anything is restored."""
        place, references = self.links.place, self.method.references
        if place.number not in references:
            kept, blocks = self.options.checkpoint.frozen, self.method.problem.blocks
            if kept == "auto":
                kept = not any(hasattr(m, "peft_config") for m in blocks.model.modules())
            references[place.number] = {}
            for unit in [] if kept else blocks.units_of(place.block):
                frozen = [n for n, p in unit.parameters().items() if not p.requires_grad]
                within = tuple(f"{name}." for name in frozen)  # such as a quantized one's scales
                references[place.number] |= {
                    name: checkpoint.reference(x)
                    for name, x in unit.tensors().items()
                    if f"{name}.".startswith(within)
                }
        return references[place.number]

    def restore(self, folder: Path) -> list[str]:
        """Go on from a checkpoint, also of another grid; give notices for the user."""
        links, blocks, device = self.links, self.method.problem.blocks, self.block.device
        with links.agreement():
            manifest = checkpoint.read_manifest(folder)
            check(RunPosition, manifest, folder / "manifest.json")
            check_same_run(self.method, self.options.names, self.num_samples, folder, manifest)
            units, optimizers = blocks.units_of(links.rank), self.block.optimizers
            checkpoint.restore(folder, manifest, units, optimizers, self.left_out)
            number = links.place.number if self.files.same_grid(manifest) else None
            self.position.restore(manifest, blocks.cuts, number)
            parts = self._parts(manifest)
            early = parts.keys() & {"sampler", "schedule"}
            first = {name: parts.pop(name) for name in sorted(early)}
            self.files.restore(first, folder, manifest, device, False)
        part = manifest["part"] == self._kinds["part"]
        comparable = number is not None and part and "program" in parts
        replaced = self._restore_timetable(manifest["local_budget"], comparable)
        if self.method.setup.local_work:
            # the sampler knows which mini-batches came before; it may ask all ranks
            earlier = self.windows.before(self.position.epoch, self.position.step)
            if self.rounds.local_work is not None:
                self.rounds.local_work.expect(earlier, manifest["fill"] == self._kinds["fill"])
        with links.agreement():
            # variables of another layout are of no use: a forward pass makes new ones
            fits = manifest["carried_as"] == self.method.carried_layout
            self.files.restore(parts, folder, manifest, device, fits)
        self.take_smaller_steps()
        notices = self.files.describe_dropped(folder, manifest, parts)
        return [*notices, *[f"{folder}: its timetable of local steps is replaced"] * replaced]

    def _restore_timetable(self, pairs: Sequence[Sequence[int]], comparable: bool) -> bool:
        """Keep a checkpoint's timetable of local steps where one is timed; whether it is replaced.

        Another one would make it another run. `comparable`: the steps are the same.
        """
        if not self.method.setup.local_work or self.method.local_budgets:
            return False
        budgets = [LocalBudget(*pair) for pair in pairs if len(pair) == 2]
        if comparable and len(budgets) == len(self.rounds.local_budgets):
            self.method.start_local_work(self.rounds, budgets)
        return bool(budgets) and budgets != self.rounds.local_budgets

    @property
    def _kinds(self) -> dict[str, Any]:
        """The settings on which the states of a checkpoint depend."""
        return {
            "solver": self.options.names["solver"],
            "fill": self.method.local_layout,
            "part": self.method.micro_batch,
            "first_trained": self.method.first_trained,
            "ties": self.method.ties_layout,
            "sync": self.options.sync.name,
        }

    def _parts(self, kinds: Mapping[str, Any]) -> dict[str, Stateful]:
        """The parts of a checkpoint that can be restored; another solver restores fewer."""
        same = {key for key, value in self._kinds.items() if kinds[key] == value}
        parts: dict[str, Stateful] = {
            "rounds": self.rounds,
            "block": self.block,
            "attributes": self.attributes,
            "sampler": self.sampler,
        }
        if self.plateau is not None:
            parts["schedule"] = self.plateau
        if same >= {"solver", "ties", "first_trained"}:
            # what is under way and how far the copies have come belong together
            if self.block.ties is not None:
                parts["ties"] = self.block.ties
            if self.rounds.program is not None:
                parts["program"] = self.rounds.program
            if self.block.sync is not None and "sync" in same:
                parts["sync"] = self.block.sync  # after the program, whose weights it may keep
        parts["data"] = self.windows.data
        return parts if self.callbacks is None else {**parts, "callbacks": self.callbacks}

    def take_smaller_steps(self) -> None:
        """Settle the step sizes: a roll-back halves local steps, and a further one all steps.

        Without local steps the first one halves exact steps, too.
        """
        count = len(self.position.rollbacks)
        exact = max(count - self.rounds.local, 0)
        self.block.rates |= {"local": 0.5**count, "exact": 0.5**exact}

    def check_samples(self, error: DivergedError) -> None:
        """Raise AgreedError on all ranks if the next samples are not finite, as no step repairs."""
        pairs = next(self.groups(), []) if self.position.epoch < self.options.train.epochs else []
        batches = [batch for trained, _ in pairs for batch in trained.batches]
        check_samples(self.block, self.links, batches, self.num_samples, "sample", error)
