"""The one declaration of every setting."""

from __future__ import annotations

from math import ceil
from typing import Any

from pydantic import Field, PrivateAttr, field_validator

from hybrid.registries import SAMPLERS
from hybrid.settings.docstrings import field_docs, one_line
from hybrid.settings.round_options import RoundOptions
from hybrid.settings.sections.base import Section
from hybrid.settings.sections.data import DataSettings, ModelSettings
from hybrid.settings.sections.ranks import CheckpointSettings, LinkSettings, SplitSettings
from hybrid.settings.sections.steps import DelaySettings, OptimizerSettings, ScheduleSettings
from hybrid.settings.sections.train import TrainSettings
from hybrid.solvers import registry
from hybrid.solvers.registry import STRATEGIES

__all__ = [
    "CheckpointSettings",
    "Config",
    "DataSettings",
    "DelaySettings",
    "LinkSettings",
    "ModelSettings",
    "OptimizerSettings",
    "RoundSettings",
    "ScheduleSettings",
    "Section",
    "SplitSettings",
    "TrainSettings",
]


class RoundSettings(Section, RoundOptions):
    """[rounds] the alternation of serial correction and parallel phase."""

    def serial_steps(self, steps: int) -> int:
        """Steps of `serial_epochs`, in epochs of so many; one at least, if there are any."""
        asked = ceil(round(self.serial_epochs * steps, 6))
        return max(asked, 1) if self.serial_epochs else 0

    @field_validator("window", mode="before")
    @classmethod
    def _a_number_or_a_word(cls, window: object) -> object:
        named = window in ("all", "auto", None)
        if not named and not (isinstance(window, int) and window >= 1):
            raise ValueError("it must be an integer of at least 1, all or auto")
        return window

    @field_validator("gaps", mode="before")
    @classmethod
    def _a_list(cls, gaps: object) -> object:
        if not isinstance(gaps, list | tuple):
            raise ValueError("it must be a list of pairs [middle, turn]")
        return gaps or ()


for _name, _help in field_docs(RoundOptions).items():
    RoundSettings.model_fields[_name].description = _help


class Config(Section):
    """All settings of a run; those of solver, correction, sync, sampler by what they are of."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    delay: DelaySettings = DelaySettings()
    solver: dict[str, Any] = Field(default={"name": registry.DEFAULT})
    correction: dict[str, Any] = Field(default={})
    sync: dict[str, Any] = Field(default={"name": STRATEGIES.default})
    sampler: dict[str, Any] = Field(default={"name": SAMPLERS.default})
    rounds: RoundSettings = RoundSettings()
    split: SplitSettings = SplitSettings()
    links: LinkSettings = LinkSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    _notices: list[str] = PrivateAttr(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """What the user should know of how the settings were read."""
        return self._notices

    @notices.setter
    def notices(self, notices: list[str]) -> None:
        self._notices = notices


def declared_settings() -> dict[str, str]:
    """Every "section.key" declared here, and its help."""
    known = {
        "solver.name": f"The method: {', '.join(registry.OWN)}; train takes auto, too.",
        "sync.name": f"How replicas keep together: {', '.join(STRATEGIES)}.",
        "sampler.name": f"Who chooses the samples of a mini-batch: {', '.join(SAMPLERS)}.",
    }
    for section, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            fields = info.annotation.model_fields
            known |= {
                f"{section}.{key}": one_line(f.description or "") for key, f in fields.items()
            }
    return known
