"""AutoAssist: a small model learns which samples are worth a pass (arXiv 1905.03381)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.data.samplers.base import Accepting, Choice, Learning, check_tensor
from hybrid.solvers.acting import NotNegative, Positive, ShareOrWhole
from hybrid.solvers.state import State

DECAY = 0.75
"""Factor by which a mini-batch shrinks the running sums of losses, as in the authors' code."""


@dataclass(frozen=True)
class AutoAssist(Learning):
    r"""An assistant, a logistic model, predicts whether a sample's loss is over the mean.

    AutoAssist (Zhang, Yu, Dhillon, NeurIPS 2019, section 3), without re-weighting:

        a_i  = sigmoid(w . vec(x_i) + b[y_i])                    x_i plain, not augmented
        P(i) = gamma + (1 - gamma) a_i                           accepted
        t_i  = [l_i > mean loss]                                 what it learns, from the losses
        (w, b) <- (w, b) - lr (mean_i (a_i - t_i) d/d(w, b) + decay (w, 0))

    a step a mini-batch; the mean is that of sums which decay by 0.75 a mini-batch. At the start
    a_i = 1/2. gamma = 1 accepts every sample.
    """

    name: ClassVar[str] = "auto-assist"

    gamma: ShareOrWhole = 0.3
    """Fraction of samples accepted regardless of the assistant."""
    lr: Positive = 0.01
    """Learning rate of the assistant."""
    decay: NotNegative = 1e-3
    """Weight decay of the assistant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr * self.decay >= 2:
            raise ValueError(
                f"decay is {self.decay:g}; it must be under 2 / lr = {2 / self.lr:g}, beyond which "
                "the assistant's weights grow without bound"
            )

    def start(self, data: Data, seed: int) -> Choice:
        inputs, _ = data.sample(1)
        if isinstance(inputs, Tensor) and not inputs.is_floating_point():
            raise ValueError(
                "sampler.name is 'auto-assist', whose assistant takes real numbers, and a sample "
                "has integers, such as tokens: choose another sampler"
            )
        return _Assistant(data, seed, self)


class _Assistant(Accepting):
    def __init__(self, data: Data, seed: int, settings: AutoAssist) -> None:
        super().__init__(data, seed)
        self.settings = settings
        self._w = torch.zeros(0, dtype=torch.float64)
        self._b = torch.zeros(0, dtype=torch.float64)
        self._sums = torch.zeros(2, dtype=torch.float64)
        """The sum of losses, and the number of them."""

    def probabilities(self, ids: Tensor) -> Tensor:
        a, _, _ = self._predictions(ids)
        return self.settings.gamma + (1 - self.settings.gamma) * a

    def _predictions(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The assistant's a, vec(x) and y of samples."""
        x = self.data.batch(ids, self.seed, max(0, self._epoch), augment=False)
        x, y = x.flatten(1).double(), self._classes(ids)
        if not len(self._w):
            self._w = x.new_zeros(x.shape[1])
        if (missing := int(y.max()) + 1 - len(self._b)) > 0:
            self._b = torch.cat([self._b, self._b.new_zeros(missing)])
        return torch.sigmoid(x @ self._w + self._b[y]), x, y

    def _classes(self, ids: Tensor) -> Tensor:
        """The classes of samples, (N,), int64; 0 where the targets are no classes."""
        targets = self.data.targets(ids, self.seed, max(0, self._epoch))
        if targets.dim() != 1 or targets.is_floating_point():
            return torch.zeros_like(ids)
        return targets.long().clamp_min(0)

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        self._sums *= DECAY
        self._sums += torch.stack([losses.double().sum(), torch.tensor(float(len(losses)))])
        t = (losses > self._sums[0] / self._sums[1]).double()
        a, x, y = self._predictions(ids)
        error = (a - t) / len(ids)
        self._w -= self.settings.lr * (x.T @ error + self.settings.decay * self._w)
        self._b -= self.settings.lr * torch.zeros_like(self._b).index_add_(0, y, error)

    def state(self) -> State:
        state = super().state()
        state.block |= {"w": self._w, "b": self._b, "sums": self._sums}
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if "w" in state.block:
            # of as many values as a sample has, or none before the first one
            values: int | None = None
            if len(state.block["w"]):
                first = torch.zeros(1, dtype=torch.int64)
                values = self.data.batch(first, self.seed, 0, augment=False).numel()
            self._w = check_tensor("w", state.block["w"], torch.float64, (values,))
            self._b = check_tensor("b", state.block["b"], torch.float64, (None,))
            self._sums = check_tensor("sums", state.block["sums"], torch.float64, (2,))
