"""A strategy by which replicas keep training while the sum of their gradients travels."""

from hybrid.errors import OWN
from hybrid_hpsgd.hpsgd import HPSGD

OWN.add(__name__)

__all__ = ["HPSGD"]
