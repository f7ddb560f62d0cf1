"""The profile of a device that a plan is for, and that this machine need not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError
from torch import Tensor, nn

from hybrid.links import Network
from hybrid.networks.costs import Moved, Passes, count_moved, survival_rate
from hybrid.networks.units import Unit
from hybrid.settings.resolve import read_toml
from hybrid.settings.sections.base import Section, first_fault
from hybrid.solvers.exact.gaps import Cost

Positive = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=1, le=1e24)]
"""A second."""
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Gigabits = Annotated[float, Field(ge=1e-9, le=1e15)]
Microseconds = Annotated[float, Field(ge=0, le=1e15)]

HOST_SECONDS = 4e-6
"""That a host takes to issue an operation where its profile does not say: Python, torch, autograd.

3.7 to 4.2 microseconds in passes through layers of 4 values, and 4.6 through a transformer of 8, on
one core of an AMD EPYC.
"""
STEP_BYTES = 5
"""Bytes moved for each of a weight's: SGD with momentum reads three vectors and writes two."""


class Roofline(Section):
    """[roofline] what the device reaches, not what its maker says that it could.

    An operation takes max(its FLOP / flops_per_second, its bytes / bytes_per_second), and
    `seconds_per_operation` of its host besides (Williams et al., Roofline, CACM 2009).
    """

    flops_per_second: Rate
    bytes_per_second: Rate
    seconds_per_operation: Seconds = HOST_SECONDS

    def seconds(self, moved: Sequence[Moved]) -> float:
        """Of operations one after the other."""
        flops, num_bytes = np.array(moved, dtype=float).reshape(-1, 2).T
        each = np.maximum(flops / self.flops_per_second, num_bytes / self.bytes_per_second)
        return float(each.sum() + self.seconds_per_operation * len(each))


class Wires(Section):
    """[network] what joins the devices."""

    ranks_per_host: Annotated[int, Field(ge=1, le=2**31)] = 1
    gigabits_per_second: Gigabits = 10.0
    """Between hosts, of one rank."""
    latency_microseconds: Microseconds = 10.0
    host_gigabits_per_second: Gigabits | None = None
    """Within a host; unset: as between hosts."""
    host_latency_microseconds: Microseconds = 5.0
    sums: Literal["ring", "hosts"] = "ring"
    """Over replicas: MPI and gloo sum in a ring of them, NCCL within a host first."""

    def network(self) -> Network:
        """The same in bytes and seconds."""
        within = None
        if self.host_gigabits_per_second is not None:
            rate = self.host_gigabits_per_second * 1e9 / 8
            within = Network(rate, self.host_latency_microseconds * 1e-6)
        rate = self.gigabits_per_second * 1e9 / 8
        latency, by_host = self.latency_microseconds * 1e-6, self.sums == "hosts"
        return Network(rate, latency, within, self.ranks_per_host, by_host)


class Device(Section):
    """A device's profile: what it reaches, its memory and its network."""

    name: str = "device"
    memory_gb: Positive | None = None
    """Of a rank, in GB (10^9 bytes); unset: no limit."""
    roofline: Roofline
    network: Wires | None = None

    @classmethod
    def read(cls, path: Path) -> Device:
        """The profile in a TOML file; ValueError, in one line, for anything else."""
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    def passes(
        self, model: nn.Module, chain: Sequence[Unit], samples: Sequence[Tensor]
    ) -> list[Passes]:
        """The time of passes over each of `samples`, as `measure_passes` gives it."""
        counts = _Counts.of(model, chain, samples[0])
        return [Passes(counts.costs(self.roofline, len(x)), 1.0) for x in samples]

    def step_seconds(self, weights: Sequence[Tensor]) -> float:
        """Of an optimizer's step: its host issues about one operation for each tensor of weights.

        SGD with momentum takes 3.6 microseconds for each where `HOST_SECONDS` was measured.
        """
        return self.roofline.seconds([Moved(0.0, STEP_BYTES * p.nbytes) for p in weights])


class _Counts(NamedTuple):
    """The operations of every unit's passes over two numbers of samples."""

    sizes: tuple[int, int]
    units: list[list[tuple[list[Moved], list[Moved]]]]
    """By size and unit: forward, backward."""
    often: list[float]
    """The share of passes in which a unit runs."""

    @classmethod
    def of(cls, model: nn.Module, chain: Sequence[Unit], sample: Tensor) -> _Counts:
        sizes = (2, 4)
        rows = [sample[:1].repeat_interleave(n, 0) for n in sizes]
        units = [count_moved(model, chain, x) for x in rows]
        return cls(sizes, units, [survival_rate(unit) for unit in chain])

    def costs(self, roofline: Roofline, n: int) -> list[Cost]:
        """Seconds of a sample in passes over n: an operation's work is a + b n."""
        found = []
        for often, few, more in zip(self.often, *self.units, strict=True):
            ways = (
                often * roofline.seconds(self._extended(*way, n)) / n
                for way in zip(few, more, strict=True)
            )
            found.append(Cost(*ways))
        return found

    def _extended(self, few: list[Moved], more: list[Moved], n: int) -> list[Moved]:
        first, second = self.sizes
        if len(few) != len(more):  # another number of operations for another number of samples
            return [Moved(n / second * flops, n / second * moved) for flops, moved in more]
        a, b = np.array(few, dtype=float), np.array(more, dtype=float)
        line = a + (b - a) * ((n - first) / (second - first))
        return [Moved(*row) for row in np.maximum(line, 0.0).reshape(-1, 2)]
