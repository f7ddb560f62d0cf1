"""The settings of [rounds], as the library's keywords and as a table of the TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybrid.settings.limits import LARGE, MANY
from solvers.exact.pipeline import FillStep

_Count = Annotated[int, Field(ge=0)]


@dataclass(kw_only=True)
class RoundOptions:
    """How serial corrections and parallel phases alternate; `RoundSettings` validates them."""

    window: int | Literal["all", "auto"] | None = None
    """Mini-batches a window, all (per sample), or auto; unset: none if gaps are filled, else 4."""
    window_limit: Annotated[int, Field(ge=1, le=MANY)] = 64
    """The most mini-batches that window auto takes, a power of two."""
    residual_limit: Annotated[float, Field(gt=0, le=LARGE)] = 0.1
    """Relative residual of a cut over which window auto goes a step back."""
    sweeps: Annotated[int | None, Field(ge=1, le=10**6)] = None
    """Passes over a window's sub-problems, of auto the most; unset: as many as the solver wants."""
    correct_every: Annotated[int | None, Field(ge=0, le=MANY)] = None
    """Rounds from one serial phase to the next, 0: none; unset: 1, or 0 for what trains alone."""
    serial_epochs: Annotated[float, Field(ge=0, le=MANY)] = 0.0
    """Epochs at the start whose rounds are serial alone: no delay, no local steps."""
    fill: bool | None = None
    """Local steps in the gaps of the serial pass; unset: if the method can and has no window."""
    fill_step: FillStep = "added"
    """A filled gap's gradient: added to the exact one, or stepped on its own."""
    gaps: Sequence[tuple[_Count, _Count]] = ()
    """Samples each block has time for, [middle, turn] of a pass; empty: by counted operations."""
    memory_gb: Annotated[float, Field(gt=0, le=LARGE)] = 4.0
    """Largest store of auxiliary variables a rank may hold, in GB (10^9 bytes)."""
