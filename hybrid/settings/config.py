"""The declarations of all settings."""

from typing import Any

from pydantic import Field

from hybrid.registries import SAMPLERS
from hybrid.settings.sections.base import Section as Section
from hybrid.settings.sections.base import field_docs
from hybrid.settings.sections.placement import CheckpointSettings as CheckpointSettings
from hybrid.settings.sections.placement import LinkSettings as LinkSettings
from hybrid.settings.sections.placement import SplitSettings as SplitSettings
from hybrid.settings.sections.rounds import RoundSettings as RoundSettings
from hybrid.settings.sections.steps import DelaySettings as DelaySettings
from hybrid.settings.sections.steps import OptimizerSettings as OptimizerSettings
from hybrid.settings.sections.steps import ScheduleSettings as ScheduleSettings
from hybrid.settings.sections.training import DataSettings as DataSettings
from hybrid.settings.sections.training import ModelSettings as ModelSettings
from hybrid.settings.sections.training import TrainSettings as TrainSettings
from hybrid.solvers import registry
from hybrid.solvers.registry import LOCAL_METHODS, STRATEGIES


class Config(Section):
    """All settings of a run; some sections have the settings of the class that `name` chooses."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    delay: DelaySettings = DelaySettings()
    solver: dict[str, Any] = Field(default={"name": registry.DEFAULT})
    fill: dict[str, Any] = Field(default={"name": LOCAL_METHODS.default})
    correction: dict[str, Any] = Field(default={})
    sync: dict[str, Any] = Field(default={"name": STRATEGIES.default})
    sampler: dict[str, Any] = Field(default={"name": SAMPLERS.default})
    rounds: RoundSettings = RoundSettings()
    split: SplitSettings = SplitSettings()
    links: LinkSettings = LinkSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


def declared_settings() -> dict[str, str]:
    """Return every "section.key" declared here, and its help."""
    known = {
        "solver.name": f"Training method: {', '.join(registry.OWN)}.",
        "fill.name": (
            "Local method that fills idle time in a delayed pipeline: "
            f"{', '.join(LOCAL_METHODS.places)}."
        ),
        "sync.name": f"How replicas synchronize: {', '.join(STRATEGIES.places)}.",
        "sampler.name": (
            f"Who chooses samples: {', '.join(SAMPLERS.places)}, or a sampler of another package."
        ),
    }
    for section, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            known |= {f"{section}.{key}": text for key, text in field_docs(info.annotation).items()}
    return known
