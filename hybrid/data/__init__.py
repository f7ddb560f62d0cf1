"""Data sets in memory, their augmentation, and where their files come from."""

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Dataset
from hybrid.data.sources import NAMES, fetch, load

__all__ = ["NAMES", "Augmentation", "Dataset", "fetch", "load"]
