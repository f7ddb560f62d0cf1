"""Data sets, their augmentation, and where their files come from."""

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Data, Dataset, Sets, hold_out
from hybrid.data.loaders import as_data
from hybrid.data.mapped import Mapped
from hybrid.data.sources import NAMES, fetch, load, reference
from hybrid.data.stream import Stream
from hybrid.data.texts import Texts, load_text

__all__ = [
    "NAMES",
    "Augmentation",
    "Data",
    "Dataset",
    "Mapped",
    "Sets",
    "Stream",
    "Texts",
    "as_data",
    "fetch",
    "hold_out",
    "load",
    "load_text",
    "reference",
]
