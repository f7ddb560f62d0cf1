"""Parameters that are frozen for the first epochs of a training, or for all of them."""

from collections.abc import Mapping

from torch import nn


class Freezing:
    """Freezes some parameters of a block for their number of epochs.

    A frozen parameter has no gradient at a step, so it does not decay, and its optimizer state does
    not change. The epoch alone decides which parameters are frozen.

    If passes may end in a later epoch than they begin (`late`), the gradients of parameters that
    are frozen for some epochs are always computed; otherwise they are not computed either.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], epochs: Mapping[str, int], late: bool
    ) -> None:
        """`epochs`: by parameter name, the epochs for which it is frozen; 0: always."""
        self._parameters, self._epochs, self._late = parameters, epochs, late
        self._initial = {name: p.requires_grad for name, p in parameters.items()}
        """requires_grad before the training, restored after it."""
        for name, count in epochs.items():
            if name in parameters and not count:
                parameters[name].requires_grad_(False)
        self._flags = {name: p.requires_grad for name, p in parameters.items()}
        """requires_grad within the current epoch."""
        self.frozen: list[nn.Parameter] = []
        """Parameters frozen in this epoch, but not always."""

    def begin(self, epoch: int) -> None:
        """Freeze the parameters of an epoch, which counts from 0, and unfreeze the others.

        ValueError if other code has changed requires_grad of a parameter.
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
            self._flags[name] = self._initial[name] and thawed
            self._parameters[name].requires_grad_(self._flags[name])

    def drop_gradients(self) -> None:
        """Drop the gradients of frozen parameters before a step."""
        for parameter in self.frozen:
            parameter.grad = None

    def remove(self) -> None:
        """Restore requires_grad of every parameter after the training."""
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(self._initial[name])
