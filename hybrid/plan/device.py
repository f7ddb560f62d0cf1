"""The profile of a device that a plan is for, and that this machine need not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tomli_w
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from hybrid.cuts.costs import Moved, Passes, count_moved, survival_rate
from hybrid.links import Network
from hybrid.models import Unit
from hybrid.settings.sections.base import Section, first_fault
from hybrid.settings.text import read_toml
from hybrid.solvers.exact.pipeline import Cost

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

STEP_BYTES = 5
"""Bytes moved for each of a weight's: SGD with momentum reads three vectors and writes two."""


class Roofline(Section):
    """[roofline] what the device reaches, not what its maker says that it could.

    An operation takes max(its FLOP / flops_per_second, its bytes / bytes_per_second), and
    `seconds_per_operation` besides (Williams et al., Roofline, CACM 2009).
    """

    flops_per_second: Positive
    bytes_per_second: Positive
    seconds_per_operation: NotNegative = 0.0

    def seconds(self, moved: Sequence[Moved]) -> float:
        """Of operations one after the other."""
        flops, num_bytes = np.array(moved, dtype=float).reshape(-1, 2).T
        each = np.maximum(flops / self.flops_per_second, num_bytes / self.bytes_per_second)
        return float(each.sum() + self.seconds_per_operation * len(each))


class Measured(Section):
    """[measured] the time of a network's units, written by `hybrid plan --measure`."""

    model: str
    units: list[str]
    samples: list[Annotated[int, Field(gt=0)]]
    """Of a pass, in rising order."""
    forward: list[list[NotNegative]]
    """Seconds of a sample: a row for each number of samples, a column for each unit."""
    backward: list[list[NotNegative]]
    step_seconds_per_byte: NotNegative
    """Of the optimizer's step, by bytes of weights."""

    @model_validator(mode="after")
    def _complete(self) -> Measured:
        rows, columns = len(self.samples), len(self.units)
        for name, table in (("forward", self.forward), ("backward", self.backward)):
            if len(table) != rows or any(len(row) != columns for row in table):
                raise ValueError(f"{name} must have {rows} rows of {columns} numbers")
        if not rows or sorted(set(self.samples)) != self.samples:
            raise ValueError("samples must be one or more numbers in rising order")
        return self


class Wires(Section):
    """[network] what joins the devices."""

    ranks_per_host: Annotated[int, Field(ge=1)] = 1
    gigabits_per_second: Positive = 10.0
    """Between hosts, of one rank."""
    latency_microseconds: NotNegative = 10.0
    host_gigabits_per_second: Positive | None = None
    """Within a host; unset: as between hosts."""
    host_latency_microseconds: NotNegative = 5.0
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
    """A device's profile: its times by a roofline, or measured, its memory and its network."""

    name: str = "device"
    memory_gb: Positive | None = None
    """Of a rank, in GB (10^9 bytes); unset: no limit."""
    roofline: Roofline | None = None
    measured: Measured | None = None
    network: Wires | None = None

    @model_validator(mode="after")
    def _timed(self) -> Device:
        if (self.roofline is None) == (self.measured is None):
            raise ValueError("it must have one of the tables [roofline] and [measured]")
        return self

    @classmethod
    def read(cls, path: Path) -> Device:
        """The profile in a TOML file; ValueError, in one line, for anything else."""
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    def write(self, path: Path) -> None:
        """As a TOML file."""
        path.write_text(tomli_w.dumps(self.model_dump(exclude_none=True)))

    def check(self, units: Sequence[str], by_units: bool) -> None:
        """ValueError if it was measured of other units, or of units where blocks are timed."""
        table = self.measured
        if table is not None and not (by_units and list(units) == table.units):
            raise ValueError(
                f"the profile of {self.name!r} was measured of the {len(table.units)} units of "
                f"{table.model}, not of this network's {len(units)}: measure this one, or give a "
                "[roofline]"
            )

    def passes(
        self, model: nn.Module, chain: Sequence[Unit], samples: Sequence[Tensor]
    ) -> list[Passes]:
        """The time of passes over each of `samples`, as `measure_passes` gives it."""
        sizes = [len(x) for x in samples]
        if self.measured is not None:
            return [Passes(self._measured(self.measured, n), 1.0) for n in sizes]
        assert self.roofline is not None
        known = _Counts.of(model, chain, samples[0])
        return [Passes(known.costs(self.roofline, n), 1.0) for n in sizes]

    def step_seconds(self, weight_bytes: int) -> float:
        """Of an optimizer's step on so many bytes of weights."""
        if self.measured is not None:
            return self.measured.step_seconds_per_byte * weight_bytes
        assert self.roofline is not None
        return self.roofline.seconds([Moved(0.0, STEP_BYTES * weight_bytes)])

    def _measured(self, table: Measured, n: int) -> list[Cost]:
        ways = np.array(table.forward).T, np.array(table.backward).T
        each = ([float(np.interp(n, table.samples, unit)) for unit in way] for way in ways)
        return [Cost(f, b) for f, b in zip(*each, strict=True)]


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
