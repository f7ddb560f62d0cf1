"""One rank's run: its block, its rounds, its share of the checkpoints."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hybrid import keeping
from hybrid.assemble import make_block, make_rounds
from hybrid.data import Dataset
from hybrid.evaluation import accuracy
from hybrid.links import RankLinks
from hybrid.progress import Progress
from hybrid.rounds import DivergedError, PhaseReport, as_json
from hybrid.runfolder import RunFolder
from hybrid.schedule import Schedule
from hybrid.stopping import StoppedError, StopRequest
from hybrid.trace import Trace
from hybrid.windows import Windows
from solvers.base import Shape, Window
from solvers.pipeline import records_needed

if TYPE_CHECKING:
    from hybrid.trainer import Trainer

_REPORT_STEPS = 16
_TOTALS = ("images", "serial_seconds", "parallel_seconds", "idle_seconds", "bytes_sent")


class Run:
    """What `Trainer.fit` runs on every rank."""

    def __init__(
        self,
        trainer: Trainer,
        links: RankLinks,
        train: Dataset,
        test: Dataset,
        shapes: list[Shape],
        device: torch.device,
        stop: StopRequest,
    ) -> None:
        self.stop = stop
        self.trainer, self.links, self.train, self.test = trainer, links, train, test
        self.blocks = trainer.blocks
        self.folder = RunFolder(trainer.out) if trainer.out is not None else None
        self.trace = Trace(links.rank, links.now)
        links.watch = self.trace.add
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        self.epoch = self.step = 0
        self.test_accuracy: float | None = None
        """Of the newest evaluation."""
        self.residual = [0.0] * (links.size - 1)
        with links.agreement():
            self._build(shapes, device)
            if self.folder is not None:
                self.folder.check(trainer.resume)
        if trainer.resume:
            with links.agreement():
                assert self.folder is not None
                keeping.take_back(self, self.folder)

    def fit(self) -> dict[str, Any]:
        """Train to the last epoch; give the summary."""
        quiet = self.trainer.quiet or self.links.rank > 0
        epochs = self.trainer.train.epochs
        with self.links.agreement():
            if self.folder is not None and self.links.rank == 0:
                self.folder.open(self.trainer.describe(self.blocks.cuts), self.step)
        self.progress = Progress(epochs, self.steps_per_epoch, self.step, quiet)
        self.progress.say(self._title())
        try:
            while self.epoch < epochs:
                self._epoch()
        except StoppedError:
            self._close(None)
            raise
        except DivergedError as error:
            self._close(None)
            raise DivergedError(f"{error}; {self._remedy()}") from None
        finally:
            self.progress.close()
        summary = self._summary()
        self._close(summary)
        return summary

    def _build(self, shapes: list[Shape], device: torch.device) -> None:
        trainer, rank = self.trainer, self.links.rank
        batch_size = trainer.train.batch_size
        every = self.steps_per_epoch = len(self.train) // batch_size
        length = every if trainer.window == "all" else min(trainer.window, every)
        before = shapes[rank - 1] if rank > 0 else None
        after = shapes[rank] if rank < len(shapes) else None
        window = length * batch_size if trainer.sweeps else 0
        records = 0
        if trainer.fill:
            records = (records_needed([trainer.gaps[rank]], batch_size) + 1) * batch_size
        store = trainer.solver.store_bytes
        kept = trainer.window == "all" and trainer.correct_every != 1
        # what the shapes of the kept variables depend on, but for the cuts
        settings = [getattr(trainer.solver, name, None) for name in ("filter", "filter_mode")]
        self.kept_as = [window, *settings] if kept else []
        exchanges = trainer.sweeps > 1 or kept
        needed = store(before, after, window, exchanges) + store(before, after, records, False)
        self._check_budget(needed, length)
        self.block = make_block(
            self.blocks, rank, trainer.optimiser, trainer.train.precision, device
        )
        self.rounds = make_rounds(
            self.block,
            self.links,
            trainer.solver,
            trainer.correction,
            batch_size=batch_size,
            window=length,
            sweeps=trainer.sweeps,
            fill=trainer.gaps if trainer.fill else None,
            fill_step=trainer.fill_step,
            correct_every=trainer.correct_every,
            kept=kept,
            trace=self.trace,
        )
        norms = torch.nn.modules.batchnorm._BatchNorm
        self.rounds.statistics = any(isinstance(m, norms) for m in self.blocks.model.modules())
        schedule = Schedule(trainer.schedule, trainer.optimiser.lr, every, trainer.train.epochs)
        solver = self.rounds.solver
        self.windows = Windows(
            self.train,
            batch_size,
            length,
            trainer.window == "all",
            trainer.sweeps,
            trainer.train.seed,
            schedule,
            device,
            solver.recorder if solver is not None else None,
            kept,
        )
        self.rounds.observe = self.windows.records_apart
        self.rounds.stop = self.stop

    def _check_budget(self, needed: int, window: int) -> None:
        budget = self.trainer.memory_gb * 1e9
        if needed > budget:
            fits = int(window * budget / needed)
            shorter = f"take a window of {fits}, or " if fits else ""
            raise ValueError(
                f"a window of {window} mini-batches needs {needed / 1e9:.3g} GB of "
                f"auxiliary variables on rank {self.links.rank}, the budget is "
                f"{self.trainer.memory_gb:g} GB: {shorter}set "
                "solver.storage=bfloat16, solver.filter=2 or a larger rounds.memory_gb"
            )

    def _epoch(self) -> None:
        reports: list[PhaseReport] = []
        for pairs in self._reporting_groups():
            # dropout and the like draw from here, so a resumed run draws what an undisturbed does
            torch.manual_seed(self.trainer.train.seed + 1000003 * self.step + self.links.rank)
            reports = self._rounds(pairs)
            if self.rounds.stopped and self.step < (self.epoch + 1) * self.steps_per_epoch:
                self._stop()
        self.rounds.end_epoch()
        self.epoch += 1
        if self._due(self.trainer.train.evaluate_every):
            with self.trace.span("evaluate"):
                self.test_accuracy = accuracy(self.block, self.links, self.test)
            self._metric({"phase": "test", "accuracy": self.test_accuracy})
        self.progress.epoch(self.epoch, reports, self.test_accuracy)
        stopped = self.rounds.stopped and self.epoch < self.trainer.train.epochs
        if self.folder and not stopped and self._due(self.trainer.checkpoint.every):
            self._keep(self.folder)
        if stopped:
            self._stop()

    def _keep(self, folder: RunFolder) -> None:
        """A checkpoint, if the weights are worth one."""
        self._check_weights()
        with self.trace.span("checkpoint"):
            keeping.keep(self, folder)

    def _stop(self) -> None:
        """Keep a checkpoint and raise StoppedError."""
        why = f"stopped by {self.rounds.stopped} after step {self.step}"
        if self.folder is None:
            raise StoppedError(f"{why}; nothing is kept, because there is no run folder")
        self._keep(self.folder)
        raise StoppedError(f"{why}; go on with --resume --out {self.folder.path}")

    def _due(self, every: int) -> bool:
        return self.epoch % every == 0 or self.epoch == self.trainer.train.epochs

    def _rounds(self, pairs: list[tuple[Window, Window]]) -> list[PhaseReport]:
        traffic = self.links.traffic
        waited, sent = traffic.total_waiting, traffic.total_bytes
        reports = self.rounds.run(pairs, self.step, self.epoch)
        self.totals["idle_seconds"] += traffic.total_waiting - waited
        self.totals["bytes_sent"] += traffic.total_bytes - sent
        self.residual = reports[-1].residual or [0.0] * (self.links.size - 1)
        self.totals["images"] += reports[0].samples
        self.step += sum(len(trained.batches) for trained, _ in pairs)
        for report in reports:
            for notice in report.notices:
                self.progress.say(notice)
            self.totals[f"{report.phase}_seconds"] += report.seconds
            self._metric({**as_json(report), "learning_rate": self.windows.schedule(self.step - 1)})
        self.progress.step(self.step, reports)
        return reports

    def _reporting_groups(self) -> Iterator[list[tuple[Window, Window]]]:
        """The epoch's windows from this step on, in groups after which the ranks report.

        A run that stopped in mid-epoch did so after such a group.
        """
        first = self.epoch * self.steps_per_epoch
        done = first
        group: list[tuple[Window, Window]] = []
        for pair in self.windows.of_epoch(self.epoch, first):
            group.append(pair)
            done += len(pair[0].batches)
            whole = sum(len(trained.batches) for trained, _ in group) >= _REPORT_STEPS
            if whole or done == first + self.steps_per_epoch:
                if done > self.step:
                    yield group
                group = []

    def _check_weights(self) -> None:
        """A loss is computed before its step: what the last step did shows here first."""
        tensors = self.block.module.state_dict().values()
        finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
        if not all(self.links.all_gather(finite)):
            raise DivergedError(f"the weights are not finite after step {self.step}")

    def _metric(self, line: dict[str, Any]) -> None:
        if self.folder is not None and self.links.rank == 0:
            self.folder.metric({"step": self.step, "epoch": self.epoch, **line})

    def _summary(self) -> dict[str, Any]:
        peak = _peak_memory_bytes(self.block.device)
        everyone = self.links.all_gather((self.totals, peak))
        totals = everyone[0][0]
        seconds = totals["serial_seconds"] + totals["parallel_seconds"]
        return {
            **self.trainer.names,
            "blocks": self.links.size,
            "cuts": self.blocks.cuts,
            "replicas": 1,
            "epochs": self.trainer.train.epochs,
            "seed": self.trainer.train.seed,
            "test_accuracy": self.test_accuracy,
            "train_seconds": seconds,
            "images_per_second": totals["images"] / seconds if seconds else 0.0,
            "serial_seconds": totals["serial_seconds"],
            "parallel_seconds": totals["parallel_seconds"],
            "idle_share": [t["idle_seconds"] / seconds if seconds else 0.0 for t, _ in everyone],
            "bytes_sent": [int(t["bytes_sent"]) for t, _ in everyone],
            "peak_memory_bytes": [p for _, p in everyone],
            "residual": self.residual,
            "returns_to_serial": self.rounds.returns,
        }

    def _title(self) -> str:
        names = self.trainer.names
        cuts = f", cut before {' and '.join(self.blocks.cuts)}" if self.blocks.cuts else ""
        resumed = f"; resumed after step {self.step}" if self.trainer.resume else ""
        return (
            f"{names['model']} on {names['data']}: {names['solver']}, "
            f"{self.links.size} block{'s' if self.links.size > 1 else ''}{cuts}; "
            f"{torch.get_num_threads()} thread(s) a block on {self.block.device}{resumed}"
        )

    def _remedy(self) -> str:
        newest = self.folder.newest() if self.folder is not None else None
        good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        return f"{good}; lower --lr (now {self.trainer.optimiser.lr:g}) or set correction.clip_norm"

    def _close(self, summary: dict[str, Any] | None) -> None:
        if self.folder is None:
            return
        everyone = self.links.all_gather(self.trace.events)
        if self.links.rank == 0:
            self.folder.close(summary, [event for rank in everyone for event in rank])


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
