"""Who chooses the samples of a mini-batch: one file a sampler, one line here."""

from hybrid.samplers.base import Sampler
from hybrid.samplers.uniform import Uniform
from solvers.checks import unknown

SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": Uniform,
}

__all__ = ["SAMPLERS", "Sampler", "Uniform", "sampler_class"]


def sampler_class(name: str) -> type[Sampler]:
    """The class of a sampler; ValueError names the nearest known name."""
    if name not in SAMPLERS:
        raise ValueError(unknown(name, SAMPLERS, "sampler"))
    return SAMPLERS[name]
