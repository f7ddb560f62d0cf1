"""Data sets, their augmentation, and where their files come from."""

from hybrid.data.augment import Augmentation as Augmentation
from hybrid.data.dataset import Data as Data
from hybrid.data.dataset import Dataset as Dataset
from hybrid.data.dataset import Sets as Sets
from hybrid.data.dataset import hold_out as hold_out
from hybrid.data.loaders import as_data as as_data
from hybrid.data.mapped import Mapped as Mapped
from hybrid.data.sources import NAMES as NAMES
from hybrid.data.sources import fetch as fetch
from hybrid.data.sources import load as load
from hybrid.data.sources import reference as reference
from hybrid.data.stream import Stream as Stream
from hybrid.data.texts import Texts as Texts
from hybrid.data.texts import load_text as load_text
