"""The profile of a device to plan for, which this machine need not have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError
from torch import Tensor, nn

from hybrid.networks.costs import Moved, count_moved, survival_rate
from hybrid.networks.units import Unit
from hybrid.settings.resolve import read_toml
from hybrid.settings.sections.base import Section, first_fault
from hybrid.solvers.local_work.budget import Cost

Positive = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=1, le=1e24)]
"""Per second."""
Seconds = Annotated[float, Field(ge=0, le=1e9)]

HOST_SECONDS = 4e-6
"""Default time of a host to issue an operation: Python, torch, autograd.

3.7 to 4.2 microseconds in passes through layers of 4 values, and 4.6 through a transformer of 8, on
one core of an AMD EPYC.
"""
STEP_BYTES = 5
"""Bytes moved per byte of weights: SGD with momentum reads three vectors and writes two."""


class Roofline(Section):
    """[roofline] the rates that the device reaches, not its specified peak.

    An operation takes max(FLOP / flops_per_second, bytes / bytes_per_second), plus
    `seconds_per_operation` on its host (Williams et al., Roofline, CACM 2009).
    """

    flops_per_second: Rate
    bytes_per_second: Rate
    seconds_per_operation: Seconds = HOST_SECONDS

    def seconds(self, moved: Sequence[Moved]) -> float:
        """Return the time of consecutive operations."""
        flops, num_bytes = np.array(moved, dtype=float).reshape(-1, 2).T
        each = np.maximum(flops / self.flops_per_second, num_bytes / self.bytes_per_second)
        return float(each.sum() + self.seconds_per_operation * len(each))


class Device(Section):
    """A device's profile: its roofline and memory."""

    memory_gb: Positive | None = None
    """Memory of a rank, in GB (10^9 bytes); unset: no limit."""
    roofline: Roofline

    @classmethod
    def read(cls, path: Path) -> "Device":
        """Read a profile from a TOML file; ValueError if it is invalid."""
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    def passes(
        self, model: nn.Module, chain: Sequence[Unit], samples: Sequence[Tensor]
    ) -> list[list[Cost]]:
        """Predict the time of passes over each of `samples`, as `measure_passes` measures it."""
        often, counted = [*map(survival_rate, chain)], [len(x) for x in samples]
        passes = []
        for n, units in zip(counted, count_moved(model, chain, samples[0], counted), strict=True):
            seconds = [[self.roofline.seconds(way) / n for way in ways] for ways in units]
            passes.append(
                [Cost(rate * f, rate * b) for rate, (f, b) in zip(often, seconds, strict=True)]
            )
        return passes

    def step_seconds(self, weights: Sequence[Tensor]) -> float:
        """Predict the time of an optimizer step, with about one operation per weight tensor.

        SGD with momentum takes 3.6 microseconds per tensor where `HOST_SECONDS` was measured.
        """
        return self.roofline.seconds([Moved(0.0, STEP_BYTES * p.nbytes) for p in weights])
