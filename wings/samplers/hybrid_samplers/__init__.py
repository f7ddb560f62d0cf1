"""Samplers that learn from losses which samples are worth a pass."""

from hybrid.errors import OWN
from hybrid_samplers.accepting import Accepting
from hybrid_samplers.assistants import Logistic
from hybrid_samplers.auto_assist import AutoAssist
from hybrid_samplers.selective_backprop import SelectiveBackprop

OWN.add(__name__)

__all__ = ["Accepting", "AutoAssist", "Logistic", "SelectiveBackprop"]
