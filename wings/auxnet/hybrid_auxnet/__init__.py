"""Auxiliary variables that a small network per cut generates from the input."""

from hybrid.errors import OWN
from hybrid_auxnet.auxnet import AuxNet

OWN.add(__name__)

__all__ = ["AuxNet"]
