"""The settings of `hybrid rl`, declared once, as `hybrid.settings` declares those of training."""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar

from pydantic import Field

from hybrid.settings.config import LinkSettings, Section
from hybrid.settings.sections.base import LARGE, MANY
from hybrid.solvers.acting import Acts

REPRESENTED = Acts("rl.representation is on", lambda run: run.settings.representation)


class RlLinkSettings(LinkSettings):
    """[links] how the ranks reach each other; they compute on the CPU."""

    acts: ClassVar[dict[str, Acts]] = {
        "links.device": Acts("a command computes on GPUs", lambda run: False),
        "links.timeout": Acts("there are several processes", lambda run: run.ranks),
    }


class RlSettings(Section):
    """[rl] the environment, the networks, and the order of steps and updates."""

    env: str = Field(default="Pendulum-v1", pattern=r"^[\w-]+(/[\w-]+)?$", max_length=200)
    """Gymnasium environment with bounded real actions."""
    steps: int = Field(default=10_000, ge=1, le=MANY)
    """Environment steps, summed over actors."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed."""
    blocks: int = Field(default=0, ge=0, le=MANY)
    """Ranks for representation, learner and actors, the last takes the rest; 0: all, or 1."""
    actors: int = Field(default=1, ge=1, le=1000)
    """Actors; each takes one step between updates."""
    lag: int = Field(default=3, ge=1, le=10_000)
    """Age of an actor's weights in updates; from 3 all ranks work at once."""
    updates: int = Field(default=1, ge=1, le=1000)
    """Updates after each step of all actors."""
    width: int = Field(default=256, ge=1, le=100_000)
    """Hidden width of critics and policy."""
    batch_size: int = Field(default=256, ge=2, le=MANY)
    """Transitions per update."""
    lr: float = Field(default=3e-4, gt=0, le=LARGE)
    """Learning rate of critics, policy, temperature (Adam)."""
    discount: float = Field(default=0.99, ge=0, lt=1)
    """Discount factor gamma."""
    polyak: float = Field(default=0.005, gt=0, le=1)
    """Polyak factor of the target critics."""
    representation: bool = True
    """Learn from features phi, psi, not from raw states and actions."""
    units: Annotated[int, REPRESENTED] = Field(default=240, ge=1, le=100_000)
    """Units of phi, and of psi, summed over layers."""
    layers: Annotated[int, REPRESENTED] = Field(default=8, ge=1, le=1000)
    """Layers of phi and of psi, all of one width."""
    representation_lr: Annotated[float, REPRESENTED] = Field(default=3e-4, gt=0, le=LARGE)
    """Learning rate of phi and psi (Adam)."""
    random_steps: int | None = Field(default=None, ge=0, le=MANY)
    """Initial random steps; unset: a tenth, at most 10,000."""
    pretrain_steps: Annotated[int | None, REPRESENTED] = Field(default=None, ge=0, le=MANY)
    """Updates of phi and psi alone afterwards; unset: random_steps."""
    replay_size: int = Field(default=1_000_000, ge=1, le=MANY)
    """Capacity of the replay buffer, in transitions."""
    evaluate_every: int | None = Field(default=None, ge=1, le=MANY)
    """Steps between evaluations; unset: a twentieth."""
    episodes: int = Field(default=10, ge=1, le=10_000)
    """Episodes per evaluation."""
    report_every: int = Field(default=100, ge=1, le=MANY)
    """Steps between reports, where a run can stop."""
    checkpoint_every: int | None = Field(default=None, ge=1, le=MANY)
    """Steps between checkpoints; unset: a tenth."""
    keep_last: int = Field(default=2, ge=0, le=MANY)
    """Number of checkpoints to keep; 0: all."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads per rank; 0: the host's cores divided by its ranks."""

    @property
    def rounds(self) -> int:
        """Steps of each actor."""
        return self.steps // self.actors

    @property
    def random_rounds(self) -> int:
        """Steps of each actor before the first update."""
        given = self.random_steps
        return ceil((min(10_000, self.steps // 10) if given is None else given) / self.actors)

    @property
    def pretraining(self) -> int:
        """Updates of only the representation."""
        if not self.representation:
            return 0
        given = self.pretrain_steps
        return self.random_rounds * self.actors if given is None else given

    def _interval(self, steps: int | None, share: int) -> int:
        """Steps of each actor in an interval of environment steps; unset: 1 / `share` of all."""
        return max(1, ceil((self.steps // share if steps is None else steps) / self.actors))

    def end_after(self, rounds: int) -> int:
        """The next round after which there is a report, an evaluation or a checkpoint."""
        R, T = self.random_rounds, self.rounds
        reports = self._interval(self.report_every, 1)
        intervals = (self.evaluation_interval, self.checkpoint_interval, reports)
        due = [(rounds // interval + 1) * interval for interval in intervals]
        return min(*due, R if rounds < R else T, T)

    @property
    def evaluation_interval(self) -> int:
        """Rounds between evaluations."""
        return self._interval(self.evaluate_every, 20)

    @property
    def checkpoint_interval(self) -> int:
        """Rounds between checkpoints."""
        return self._interval(self.checkpoint_every, 10)


class RlConfig(Section):
    """All settings of a run of `hybrid rl`."""

    rl: RlSettings = RlSettings()
    links: RlLinkSettings = RlLinkSettings()


def help_texts() -> dict[str, str]:
    """Every "section.key", and what it means."""
    return {
        f"{section}.{key}": " ".join((info.description or "").split())
        for section, settings in RlConfig()
        for key, info in type(settings).model_fields.items()
    }
