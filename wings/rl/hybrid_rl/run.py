"""A run of `hybrid rl`: steps, reports, evaluations, checkpoints."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from hybrid.errors import AgreedError, StoppedError, tell
from hybrid.folder.checkpoint import file_sizes
from hybrid.links import RankLinks
from hybrid.links.grid import Grid
from hybrid.ranks import launch, starting
from hybrid.ranks.stopping import StopRequest, leave, listening
from hybrid.rounds.trace import Trace
from hybrid.settings.config import CheckpointSettings
from hybrid.training.shared_folder import SharedFolder
from hybrid_rl import checkpointing
from hybrid_rl.course import Course
from hybrid_rl.environment import make, sizes
from hybrid_rl.parts import Networks
from hybrid_rl.resolve import to_toml
from hybrid_rl.settings import RlConfig


def train(config: RlConfig, out: Path | None, resume: bool) -> dict[str, Any]:
    """Run it on MPI's ranks, else on threads; give the summary."""
    comm = launch.communicator()
    blocks = comm.size if comm is not None else config.rl.blocks or 1
    launch.keep_memory()
    torch.set_num_threads(config.rl.threads or launch.threads_per_rank(blocks))
    with listening() as stop:

        def rank(links: RankLinks) -> dict[str, Any]:
            return Run(config, links, out, resume, stop).train()

        return starting.start(rank, Grid(blocks), config.links, None)


class RankReport(NamedTuple):
    """What a rank tells the others at every report."""

    stop: str
    """The signal it has got, empty without one."""
    losses: dict[str, float]
    episodes: list[dict[str, Any]]
    """Of its actors, that have ended since the last report."""
    seconds: float
    waited: float


class Run:
    """What every rank runs; all ranks call what is public."""

    def __init__(
        self, config: RlConfig, links: RankLinks, out: Path | None, resume: bool, stop: StopRequest
    ) -> None:
        rl = self.rl = config.rl
        self.config, self.links, self.resume, self.stop = config, links, resume, stop
        self.folder = SharedFolder(out, links, CheckpointSettings(keep_last=rl.keep_last))
        self.trace = Trace(links.place, links.now)
        links.watch = self.trace.add
        self.rounds = 0
        """Steps of each actor so far."""
        self.seconds = 0.0
        """Of learning so far, by the slowest rank."""
        self.waited, self.since = [0.0] * links.size, 0.0
        """Seconds that each rank has waited for others, of the seconds since these ranks began."""
        self.stopped = ""
        """Why any rank has been asked to stop."""
        self.returns: list[float] = []
        """Of the newest evaluation."""
        with links.agreement():
            self.course = Course(links, Networks(rl, *sizes(make(rl.env))))

    def train(self) -> dict[str, Any]:
        """Go on to the last step; give the summary. Meanwhile the run folder is this run's."""
        try:
            for notice in self.folder.claim(self.resume):
                self._say(notice)
            if self.resume:
                self._go_on()
                stored = self.folder.stored_summary() if self.rounds >= self.rl.rounds else None
                if stored is not None:
                    self._say(f"{self.folder.path} has ended after {self._steps} steps, and stays")
                    return stored
            self.folder.open(lambda: to_toml(self.config), self._steps, 0)
            try:
                while self.rounds < self.rl.rounds:
                    self._to(self.rl.end_after(self.rounds))
            except (AgreedError, StoppedError):
                self.folder.write_results(None, self.trace)
                raise
            found = self._summary()
            self.folder.write_results(found, self.trace)
            return found
        finally:
            self.folder.release()

    @property
    def _steps(self) -> int:
        """Environment steps so far."""
        return self.rounds * self.rl.actors

    def _to(self, end: int) -> None:
        """All until a round after which there is something to do."""
        rl, front = self.rl, self.course.front
        learning = self.rounds >= rl.random_rounds
        if self.rounds == rl.random_rounds and front is not None:
            with self.trace.span("pretraining"):
                front.pretrain()
        self.links.all_gather_grid(
            None
        )  # so that the clock counts no waiting for what is not counted
        start, waited = self.links.now(), self.links.traffic.total_waiting
        with self.trace.span("steps"):
            self.course.run(self.rounds, end)
        seconds = self.links.now() - start
        self.rounds = end
        self._report(seconds, self.links.traffic.total_waiting - waited, learning)
        last = end == rl.rounds
        if end >= rl.random_rounds and (last or end % rl.evaluation_interval == 0):
            self._evaluate()
        stopped = self.stopped and not last
        if last or stopped or end % rl.checkpoint_interval == 0:
            self._write_checkpoint()
        if stopped:
            leave(self.links, f"{self.stopped} after step {self._steps}; go on with --resume")

    def _report(self, seconds: float, waited: float, learning: bool) -> None:
        """Exchange what happened since the last report; AgreedError for a loss that is not finite.

        Times count where the ranks were `learning`.
        """
        course = self.course
        episodes = [episode for actor in course.actors for episode in actor.ended]
        losses: dict[str, float] = {}
        for actor in course.actors:
            actor.ended = []
        for part in (course.front, course.middle):
            losses |= {} if part is None else part.mean_losses()
        everyone = self.links.all_gather_grid(
            RankReport(self.stop(), losses, episodes, seconds, waited)
        )
        self.stopped = next((one.stop for one in everyone if one.stop), "")
        if learning:
            slowest = max(one.seconds for one in everyone)
            self.seconds, self.since = self.seconds + slowest, self.since + slowest
            self.waited = [a + b.waited for a, b in zip(self.waited, everyone, strict=True)]
        episodes = [episode for one in everyone for episode in one.episodes]
        for episode in sorted(episodes, key=lambda e: (e["step"], e["actor"])):
            self._write_metrics({"phase": "episode", **episode})
        losses = {name: value for one in everyone for name, value in one.losses.items()}
        if losses:
            self._write_metrics({"step": self._steps, "phase": "learn", **losses})
        wrong = next((name for name, value in losses.items() if not isfinite(value)), None)
        if wrong is not None:
            raise AgreedError(
                f"the loss {wrong!r} is not finite after step {self._steps}: lower rl.lr "
                f"({self.rl.lr:g}) or rl.representation_lr ({self.rl.representation_lr:g})"
            )

    def _evaluate(self) -> None:
        actors = self.course.actors
        found: list[float] = []
        with self.trace.span("evaluate"):
            if actors and actors[0].number == 0:
                found = actors[0].evaluate(self.rounds)
        self.returns = self.links.first_of(found or None) or []
        mean = fmean(self.returns)
        line = {"step": self._steps, "phase": "evaluation", "return": mean}
        self._write_metrics({**line, "returns": self.returns})
        self._say(f"step {self._steps}: return {mean:.1f} in {len(self.returns)} episodes")

    def _write_checkpoint(self) -> None:
        if self.folder.path is None:
            return
        units, states = checkpointing.collect(self.course)
        own = {key: getattr(self.rl, key) for key in checkpointing.SAME}
        own |= {"rounds": self.rounds, "returns": self.returns, "seconds": self.seconds}
        self.folder.write_checkpoint(self._steps, units, states, own)

    def _go_on(self) -> None:
        folder = self.folder.checkpoints()[-1]
        with self.folder.fetched(folder, file_sizes) as local, self.links.agreement():
            found = checkpointing.restore(local, self.rl, self.course)
            self.rounds, self.returns, self.seconds = found.rounds, found.returns, found.seconds
        self._say(f"going on after step {self._steps}")

    def _summary(self) -> dict[str, Any]:
        rl = self.rl
        sent = self.links.all_gather_grid(self.links.traffic.total_bytes)
        learned = rl.rounds - rl.random_rounds
        rates = {"steps": learned * rl.actors, "updates": learned * rl.updates}
        same = ("env", "steps", "seed", "actors", "lag", "width", "representation")
        return {
            **{name: getattr(rl, name) for name in same},
            "blocks": self.links.size,
            "return": fmean(self.returns),
            "returns": self.returns,
            "updates": rates["updates"],
            "train_seconds": self.seconds,
            **{
                f"{name}_per_second": number / self.seconds if self.seconds else None
                for name, number in rates.items()
            },
            "idle_share": [min(1.0, w / self.since) if self.since else 0.0 for w in self.waited],
            "bytes_sent": sent,
            "threads": torch.get_num_threads(),
        }

    def _write_metrics(self, line: dict[str, Any]) -> None:
        notice = self.folder.write_metric(line)
        if notice:
            self._say(notice)

    def _say(self, text: str) -> None:
        if self.links.place.number == 0:
            tell(f"hybrid: {text}")
