"""A run of `hybrid rl` on one rank: steps, reports, evaluations, checkpoints."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from hybrid.errors import AgreedError, StoppedError, tell
from hybrid.links import RankLinks
from hybrid.ranks.stopping import StopRequest, leave
from hybrid.rl import keeping
from hybrid.rl.course import Course
from hybrid.rl.environment import make, sizes
from hybrid.rl.parts import Networks
from hybrid.rl.resolve import to_toml, too_many
from hybrid.rl.settings import RlConfig
from hybrid.rounds.trace import Trace
from hybrid.settings.config import CheckpointSettings
from hybrid.training.shared_folder import SharedFolder


class Told(NamedTuple):
    """What a rank has to say at a report."""

    stop: str
    """The signal it has got, empty without one."""
    losses: dict[str, float]
    episodes: list[dict[str, Any]]
    """Of its actors, that have ended since."""
    seconds: float
    waited: float


class Run:
    """What every rank runs; all call what is public."""

    def __init__(
        self, config: RlConfig, links: RankLinks, out: Path | None, resume: bool, stop: StopRequest
    ) -> None:
        rl = self.rl = config.rl
        self.config, self.links, self.resume, self.stop = config, links, resume, stop
        checkpoint = CheckpointSettings(keep_last=rl.keep_last)
        self.folder = SharedFolder(out, links, checkpoint)
        self.trace = Trace(links.place, links.now)
        links.watch = self.trace.add
        self.rounds = 0
        """Steps of each actor so far."""
        self.counted = keeping.Counted()
        self.stopped = ""
        """Why any rank has been asked to stop."""
        self.returns: list[float] = []
        """Of the newest evaluation."""
        with links.agreement():
            if links.size > 2 + rl.actors:
                raise ValueError(too_many(links.size, rl.actors))
            self.course = Course(links, Networks(rl, *sizes(make(rl.env))))

    def train(self) -> dict[str, Any]:
        """Go on to the last step; give the summary. Meanwhile the run folder is this run's."""
        try:
            for notice in self.folder.claim(self.resume):
                self._say(notice)
            if self.resume:
                self._go_on()
                stored = self.folder.ended() if self.rounds >= self.rl.rounds else None
                if stored is not None:
                    self._say(f"{self.folder.path} has ended after {self._steps} steps, and stays")
                    return stored
            self.folder.open(lambda: to_toml(self.config), self._steps, 0)
            try:
                while self.rounds < self.rl.rounds:
                    self._to(self.rl.end_after(self.rounds))
                self.folder.finish()
            except (AgreedError, StoppedError):
                self.folder.close(None, self.trace)
                raise
            found = self._summary()
            self.folder.close(found, self.trace)
            return found
        finally:
            self.folder.settle()
            self.folder.release()

    @property
    def _steps(self) -> int:
        """Environment steps so far."""
        return self.rounds * self.rl.actors

    def _to(self, end: int) -> None:
        """All until a round after which there is something to do."""
        rl, front = self.rl, self.course.front
        if self.rounds == rl.random_rounds and front is not None:
            with self.trace.span("pretraining"):
                front.pretrain()
        self.links.everyone(None)  # so that the clock counts no waiting for what is not counted
        start, waited = self.links.now(), self.links.traffic.total_waiting
        with self.trace.span("steps"):
            self.course.run(self.rounds, end)
        seconds = self.links.now() - start
        before, self.rounds = self.rounds, end
        self._report(seconds, self.links.traffic.total_waiting - waited, before)
        last = end == rl.rounds
        if end >= rl.random_rounds and (last or end % rl.evaluating == 0):
            self._evaluate()
        stopped = self.stopped and not last
        if last or stopped or end % rl.keeping == 0:
            self._keep()
        if stopped:
            self.folder.finish()
            leave(self.links, f"{self.stopped} after step {self._steps}; go on with --resume")

    def _report(self, seconds: float, waited: float, before: int) -> None:
        """Tell each other how it goes; AgreedError where a loss is no number any more."""
        course = self.course
        ended = [episode for actor in course.actors for episode in actor.ended]
        for actor in course.actors:
            actor.ended = []
        told = Told(self.stop(), keeping.losses(course), ended, seconds, waited)
        everyone = self.links.everyone(told)
        self.stopped = next((one.stop for one in everyone if one.stop), "")
        if before >= self.rl.random_rounds:
            self.counted.add(
                (self.rounds - before) * self.rl.actors,
                (self.rounds - before) * self.rl.updates,
                max(one.seconds for one in everyone),
                [one.waited for one in everyone],
            )
        episodes = (episode for one in everyone for episode in one.episodes)
        for episode in sorted(episodes, key=lambda e: (e["step"], e["actor"])):
            self._metric({"phase": "episode", **episode})
        found = {name: value for one in everyone for name, value in one.losses.items()}
        if found:
            self._metric({"step": self._steps, "phase": "learn", **found})
        wrong = next((name for name, value in found.items() if not isfinite(value)), None)
        if wrong is not None:
            raise AgreedError(
                f"the {wrong} is no number after step {self._steps}: lower rl.lr "
                f"({self.rl.lr:g}) or rl.representation_lr ({self.rl.representation_lr:g})"
            )

    def _evaluate(self) -> None:
        actors = self.course.actors
        found: list[float] = []
        with self.trace.span("evaluate"):
            if actors and actors[0].number == 0:
                found = actors[0].evaluate(self.rounds)
        self.returns = next(own for own in self.links.everyone(found) if own)
        mean = fmean(self.returns)
        line = {"step": self._steps, "phase": "evaluation", "return": mean}
        self._metric({**line, "returns": self.returns})
        self._say(f"step {self._steps}: return {mean:.1f} in {len(self.returns)} episodes")

    def _keep(self) -> None:
        if self.folder.path is None:
            return
        units, states = keeping.collect(self.course)
        kept = keeping.Progress.of(self.rl, self.rounds, self.returns, self.counted)
        self.folder.keep(self._steps, units, states, kept.model_dump())

    def _go_on(self) -> None:
        folder = self.folder.checkpoints()[-1]
        with self.links.agreement():
            found = keeping.restore(folder, self.rl, self.course)
            self.rounds, self.returns = found.rounds, found.returns
            self.counted = keeping.Counted.of(found, self.links.place.count)
        self._say(f"going on after step {self._steps}")

    def _summary(self) -> dict[str, Any]:
        rl, counted = self.rl, self.counted
        everyone = self.links.everyone(self.links.traffic.total_bytes)
        return {
            "env": rl.env,
            "steps": rl.steps,
            "seed": rl.seed,
            "actors": rl.actors,
            "lag": rl.lag,
            "blocks": self.links.size,
            "width": rl.width,
            "representation": rl.representation,
            "return": fmean(self.returns),
            "returns": self.returns,
            "updates": counted.updates,
            "train_seconds": counted.seconds,
            "steps_per_second": counted.steps / counted.seconds if counted.seconds else None,
            "updates_per_second": counted.updates / counted.seconds if counted.seconds else None,
            "idle_share": counted.idle(),
            "bytes_sent": everyone,
            "threads": torch.get_num_threads(),
        }

    def _metric(self, line: dict[str, Any]) -> None:
        notice = self.folder.metric(line)
        if notice:
            self._say(notice)

    def _say(self, text: str) -> None:
        if self.links.place.number == 0:
            tell(f"hybrid: {text}")
