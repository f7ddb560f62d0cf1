"""Parameters that are not trained for the first epochs of a training, or in none of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class Freezing:
    """The parameters of a block, and the epochs for which some of them are frozen.

    A frozen parameter has no gradient when a step is made, so neither it nor what the optimizer
    keeps of it changes, nor does it decay. What is frozen is a function of the epoch alone.

    Passes that end in a later epoch than they begin (`late`) always compute the gradients of what
    is frozen for some epochs; otherwise these are not computed either.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], epochs: Mapping[str, int], late: bool
    ) -> None:
        """`epochs`: by name how many a parameter is frozen for; 0: always."""
        self._parameters, self._epochs, self._late = parameters, epochs, late
        self._given = {name: p.requires_grad for name, p in parameters.items()}
        """What it was before the training, and is again after it."""
        for name, count in epochs.items():
            if name in parameters and not count:
                parameters[name].requires_grad_(False)
        self._flags = {name: p.requires_grad for name, p in parameters.items()}
        """What it is within an epoch."""
        self.frozen: list[nn.Parameter] = []
        """For some epochs, this one among them."""

    def begin(self, epoch: int) -> None:
        """Freeze what is frozen in an epoch, which counts from 0, and nothing else.

        ValueError if another than this has changed whether a parameter is trained.
        """
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != self._flags[name]:
                raise ValueError(
                    f"requires_grad of {name} was set to {parameter.requires_grad} while the "
                    "training ran, which other ranks do not see: let train.frozen say for how many "
                    f"epochs it is frozen (train.frozen.{name}=2), or set it before fit"
                )
        names = [name for name, count in self._epochs.items() if epoch < count]
        self.frozen = [p for name in names if (p := self._parameters.get(name)) is not None]
        for name in self._epochs.keys() & self._parameters.keys() if not self._late else ():
            thawed = 0 < self._epochs[name] <= epoch
            self._flags[name] = self._given[name] and thawed
            self._parameters[name].requires_grad_(self._flags[name])

    def drop_gradients(self) -> None:
        """Before a step: there are none of what is frozen."""
        for parameter in self.frozen:
            parameter.grad = None

    def remove(self) -> None:
        """Leave every parameter as it was before the training."""
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(self._given[name])
