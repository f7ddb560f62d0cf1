"""Descriptions of a cut network before training: units, blocks, cuts and their memory."""

from hybrid.bench.show.counting import describe
from hybrid.bench.show.description import Description
from hybrid.bench.show.picture import draw

__all__ = ["Description", "describe", "draw"]
