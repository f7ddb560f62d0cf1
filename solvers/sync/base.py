"""What a strategy for replicas is: called where a block's weights move."""

from typing import Protocol

from torch import nn


class Replica(Protocol):
    """What a strategy sees of a block: its weights and their gradients."""

    module: nn.Module


class Sync(Protocol):
    """Keeps the weights of one block's replicas together; each has a copy of the strategy."""

    def before_step(self, block: Replica, kind: str) -> None:
        """The gradients of a step of `kind` are at hand: agree on them, or leave them alone."""

    def after_step(self, block: Replica, kind: str) -> None:
        """The weights have moved."""

    def join(self, block: Replica) -> None:
        """Make weights and statistics equal, as a checkpoint and an evaluation need them.

        Whoever replaces a weight's values outside of a step gives the parameter memory of its own:
        what is under way may still need the old ones, where they were.
        """
