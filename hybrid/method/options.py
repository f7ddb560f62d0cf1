"""What a training needs beside its blocks, its data and its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybrid.data.mixing import Transform
from hybrid.data.samplers.base import Sampler
from hybrid.method.given import Given, GivenSettings
from hybrid.optimizers import optimizer as optimizers
from hybrid.optimizers.schedule import Rate
from hybrid.registries import SAMPLERS
from hybrid.settings.config import (
    DelaySettings,
    LinkSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainSettings,
)
from hybrid.solvers.blocks.metrics import Metric
from hybrid.solvers.blocks.weighted import Loss
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.base import Strategy


@dataclass(kw_only=True)
class Options:
    """The settings of a training beside its blocks and its method, as objects."""

    sampler: Given[Sampler] = Given(Sampler, SAMPLERS.__getitem__, SAMPLERS.default)  # type: ignore[type-abstract]
    """Who chooses the samples of a mini-batch; as a class or by name: with its defaults."""
    replicas: int = 1
    """R, chains of the blocks; each trains on a share of every mini-batch."""
    side_by_side: Literal["auto", "chain", "peers"] = "auto"
    """MPI ranks that follow each other: a chain, peers, or those that send each other more."""
    sync: Given[Strategy] = Given(Strategy, STRATEGIES.__getitem__, STRATEGIES.default)
    """How replicas keep their weights together; as a class or by name: with its defaults."""
    train: GivenSettings[TrainSettings] = GivenSettings(TrainSettings)
    """Length, mini-batches and numerics of the training, as settings or a dict."""
    optimizer: GivenSettings[OptimizerSettings | optimizers.Factory] = GivenSettings(
        OptimizerSettings, callable=True
    )
    """Settings or a name, or what makes one from a block's groups: see `optimizers.Factory`."""
    schedule: GivenSettings[ScheduleSettings | Rate] = GivenSettings(
        ScheduleSettings, callable=True
    )
    """Settings or a name, or the learning rate as a function of the step."""
    delay: GivenSettings[DelaySettings] = GivenSettings(DelaySettings)
    """Settings, or the mend alone: what a step does about the delay of its gradient."""
    links: GivenSettings[LinkSettings] = GivenSettings(LinkSettings)
    """How ranks reach each other: settings, a dict, or the kind of links alone."""
    loss: Loss | None = None
    """(output, targets) -> mean loss or a loss of each sample; None: cross-entropy of classes."""
    metrics: Mapping[str, Metric] | None = None
    """By name what is measured, see `Metric`; None: accuracy of classes."""
    batch_transform: Transform | None = None
    """(inputs, targets, generator) -> both, of every training mini-batch: mixup, CutMix; see
    `Transform`."""

    def check(self) -> None:
        """ValueError for what cannot be, whatever the method."""
        if not 1 <= self.replicas <= self.train.batch_size:
            raise ValueError(
                f"split.replicas is {self.replicas}, and a mini-batch has {self.train.batch_size} "
                "samples, of which each needs one: take fewer replicas, or a larger --batch-size"
            )
