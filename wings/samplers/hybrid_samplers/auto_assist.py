"""AutoAssist: a small model learns which samples are worth a pass (arXiv 1905.03381)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hybrid.data.dataset import Data
from hybrid.data.samplers.base import Choice, Learning, check_tensor
from hybrid.solvers.acting import NotNegative, Positive, ShareOrWhole
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.state import State
from hybrid_samplers.accepting import Accepting
from hybrid_samplers.assistants import LOGISTIC, Assistant, AssistantName, OptimizerName

DECAY = 0.75
"""Factor by which a mini-batch shrinks the running sums of losses, as in the authors' code."""


@dataclass(frozen=True)
class AutoAssist(Learning):
    r"""An assistant predicts whether a sample's loss is over the mean.

    AutoAssist (Zhang, Yu, Dhillon, NeurIPS 2019, section 3), without re-weighting:

        a_i  = sigmoid(g(x_i, y_i; v))                 x_i plain, not augmented
        P(i) = gamma + (1 - gamma) a_i                 accepted
        t_i  = [l_i > mean loss]                       what it learns, from the losses
        v   <- optimizer step on the mean of -t_i log a_i - (1 - t_i) log(1 - a_i)

    a step a mini-batch; the mean is that of sums which decay by 0.75 a mini-batch. gamma = 1
    accepts every sample. g is a logistic model of real numbers, or of a bag of words as in the
    paper's translation (see `Logistic`), which starts at a_i = 1/2; or a user's module.
    """

    name: ClassVar[str] = "auto-assist"

    gamma: ShareOrWhole = 0.3
    """Fraction of samples accepted regardless of the assistant."""
    assistant: AssistantName = LOGISTIC
    """The assistant: logistic, or your package.module:function, which makes a module."""
    optimizer: OptimizerName = "sgd"
    """Optimizer of the assistant."""
    lr: Positive = 0.01
    """Learning rate of the assistant."""
    decay: NotNegative = 1e-3
    """Weight decay of the assistant's matrices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr * self.decay >= 2:
            raise ValueError(
                f"decay is {self.decay:g}; it must be under 2 / lr = {2 / self.lr:g}, beyond which "
                "the assistant's weights grow without bound"
            )

    def start(self, data: Data, seed: int) -> Choice:
        return Assisted(data, seed, self)


class Assisted(Accepting):
    """The choice of an assistant."""

    def __init__(self, data: Data, seed: int, settings: AutoAssist) -> None:
        super().__init__(data, seed)
        self.gamma = settings.gamma
        self.assistant = Assistant(
            settings.assistant,
            data.sample(2),
            seed,
            settings.optimizer,
            settings.lr,
            settings.decay,
        )
        self._sums = torch.zeros(2, dtype=torch.float64)
        """The sum of losses, and the number of them."""

    def probabilities(self, ids: Tensor) -> Tensor:
        a = self.assistant.predict(*self._samples(ids))
        return self.gamma + (1 - self.gamma) * a

    def _samples(self, ids: Tensor) -> tuple[Any, Any]:
        """Inputs and targets as the network and the loss get them, on the CPU.

        What a data set draws for targets is that of epoch 0, as for inputs: it is read once.
        """
        data = self.data
        x = data.batch(ids, self.seed, 0, augment=False)
        return _whole(x, data.inputs), _whole(data.targets(ids, self.seed, 0), data.answers)

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        self._sums *= DECAY
        self._sums += torch.stack([losses.double().sum(), torch.tensor(float(len(losses)))])
        self.assistant.learn(*self._samples(ids), losses > self._sums[0] / self._sums[1])

    def state(self) -> State:
        state = super().state()
        state.block |= {"sums": self._sums, **self.assistant.state()}
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if "sums" in state.block:
            self._sums = check_tensor("sums", state.block["sums"], torch.float64, (2,))
            self.assistant.load_state(state.block)


def _whole(packed: Tensor, bundle: Bundle | None) -> Any:
    value = packed if bundle is None else bundle.unpack(packed)
    return tree_map(lambda x: x.cpu(), value)
