"""Data sets, their augmentation, and where their files come from."""

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Data, Dataset
from hybrid.data.mapped import Mapped, as_data
from hybrid.data.sources import NAMES, fetch, load, reference

__all__ = [
    "NAMES",
    "Augmentation",
    "Data",
    "Dataset",
    "Mapped",
    "as_data",
    "fetch",
    "load",
    "reference",
]
