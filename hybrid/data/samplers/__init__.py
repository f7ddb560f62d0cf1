"""Who chooses the samples of a mini-batch: one file a sampler."""

from hybrid.data.samplers.base import Choice as Choice
from hybrid.data.samplers.base import Learning as Learning
from hybrid.data.samplers.base import Sampler as Sampler
from hybrid.data.samplers.uniform import Uniform as Uniform
from hybrid.registries import SAMPLERS as SAMPLERS
