"""Who chooses the samples of a mini-batch: one file a sampler, one line here."""

from __future__ import annotations

from hybrid.samplers.base import Sampler
from hybrid.samplers.uniform import Uniform

SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform}

__all__ = ["SAMPLERS", "Sampler", "Uniform"]
