"""Who chooses the samples of a mini-batch: one file a sampler."""

from hybrid.data.samplers.auto_assist import AutoAssist
from hybrid.data.samplers.base import Choice, Learning, Sampler
from hybrid.data.samplers.selective_backprop import SelectiveBackprop
from hybrid.data.samplers.uniform import Uniform
from hybrid.registries import SAMPLERS

__all__ = [
    "SAMPLERS",
    "AutoAssist",
    "Choice",
    "Learning",
    "Sampler",
    "SelectiveBackprop",
    "Uniform",
]
