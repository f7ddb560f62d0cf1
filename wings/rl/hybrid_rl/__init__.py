"""Reinforcement learning in blocks: a representation, a learner, and actors."""

from hybrid.errors import OWN

OWN.add(__name__)
