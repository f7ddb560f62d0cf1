"""Data sets, their augmentation, and where their files come from."""

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Data, Dataset
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
    "Stream",
    "Texts",
    "as_data",
    "fetch",
    "load",
    "load_text",
    "reference",
]
