"""Assistants: small modules from the inputs and targets of samples to one logit a sample."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybrid.data.samplers.base import check_tensor
from hybrid.solvers.acting import Allowed
from hybrid.solvers.named import is_reference, load_object, made_by_user
from hybrid.solvers.numerics.draws import Drawing
from hybrid.solvers.numerics.optimizer_state import (
    from_tensors,
    optimizer_state,
    parameters_of,
    to_tensors,
)
from hybrid.solvers.state import entries

LOGISTIC = "logistic"
ROWS = 1 << 14
"""Numbers that a bag of words tells apart."""
NUMBER = 4
"""Distinguishes the random numbers of assistants from those of a network's units and heads."""

AssistantName = Annotated[
    str,
    Allowed(
        "be logistic, or your package.module:function",
        lambda name: name == LOGISTIC or is_reference(name),
    ),
]
OptimizerName = Literal["sgd", "adamw"]


class Logistic(nn.Module):
    r"""A linear model of a sample, from zero, in float64; sums are over T numbers of the sample.

        <w, vec(x)>                of inputs that are real numbers
        sum_t u[x_t] / sqrt(T)     of inputs that are integers, such as tokens: a bag of words
        sum_t b[y_t] / sqrt(T)     of targets that are integers: the bias of a class, if T = 1

    Real targets do not count. Integers are taken modulo `ROWS`.
    """

    def __init__(self, inputs: Any, targets: Any) -> None:
        super().__init__()
        reals, integers = _numbers(inputs)
        rows = ROWS if integers.shape[1] else 0
        self.w = nn.Parameter(torch.zeros(1, reals.shape[1], dtype=torch.float64))
        self.u = nn.Parameter(torch.zeros(rows, 1, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        reals, words = _numbers(inputs)
        _, answers = _numbers(targets)
        out: Tensor = reals @ self.w[0] + _bag(self.u[:, 0], words) + _bag(self.b, answers)
        return out


def _numbers(value: Any) -> tuple[Tensor, Tensor]:
    """The real numbers of samples (N, D), float64, and their integers (N, T), int64."""
    reals, integers = [], []
    for x in tree_leaves(value):
        x = torch.view_as_real(x) if x.is_complex() else x
        rows = x.reshape(len(x), -1)
        reals.append(rows.double() if x.is_floating_point() else rows[:, :0].double())
        integers.append(rows[:, :0].long() if x.is_floating_point() else rows.long())
    return torch.cat(reals, 1), torch.cat(integers, 1)


def _bag(table: Tensor, words: Tensor) -> Tensor:
    count = words.shape[1]
    return table[words % ROWS].sum(1) / sqrt(max(1, count))


class Assistant:
    """A module with its optimizer, the same on any rank and in every run.

    `name`: logistic, or package.module:function of a user's, which is called with the inputs and
    the targets of two samples, as the network and the loss get them, and returns a module from
    inputs and targets to logits (N,). Its random numbers depend on the seed and the step alone.
    """

    def __init__(
        self,
        name: str,
        sample: tuple[Any, Any],
        seed: int,
        optimizer: OptimizerName,
        lr: float,
        decay: float,
    ) -> None:
        self.name, self.seed, self.steps = name, seed, 0
        make = Logistic if name == LOGISTIC else load_object(name, "sampler.assistant=")
        with self._draws(), torch.no_grad():
            self.module: nn.Module = self._of_user(lambda: make(*sample), nn.Module)
            self.module.eval()
            self.logits(*sample)  # which gives lazy modules their shapes
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"sampler.assistant={name} has no parameter to train: give it one")
        # what is no matrix, such as a bias, does not decay
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        cls = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = cls(groups, lr=lr)

    def _draws(self, *key: int) -> AbstractContextManager[Any]:
        """Make random numbers a function of the seed and a key; a logistic model draws none."""
        logistic = self.name == LOGISTIC
        return nullcontext() if logistic else Drawing((self.seed, NUMBER, *key))

    def _of_user(self, code: Callable[[], Any], wanted: type) -> Any:
        """What a user's code gives; ValueError, on one line, if that is not what is wanted."""
        return made_by_user(f"sampler.assistant={self.name}", code, wanted)

    def logits(self, inputs: Any, targets: Any) -> Tensor:
        """One logit a sample, (N,)."""
        count = len(tree_leaves(inputs)[0])
        logits: Tensor = self._of_user(lambda: self.module(inputs, targets), Tensor)
        if logits.shape != (count,) or not logits.is_floating_point():
            raise ValueError(
                f"sampler.assistant={self.name} gives {tuple(logits.shape)} of {logits.dtype} for "
                f"{count} samples: it must be a real number for each, ({count},)"
            )
        return logits

    def predict(self, inputs: Any, targets: Any) -> Tensor:
        """The probability of each sample that it is worth a pass, (N,), float64."""
        with torch.no_grad(), self._draws(0, self.steps):
            return self.logits(inputs, targets).double().sigmoid()

    def learn(self, inputs: Any, targets: Any, worth: Tensor) -> None:
        """Step on the logistic loss of samples that were worth a pass (N,), 1 or 0."""
        self.steps += 1
        self.module.train()
        self.optimizer.zero_grad()
        with torch.enable_grad(), self._draws(1, self.steps):
            logits = self.logits(inputs, targets)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, worth.to(logits.dtype))
            self._of_user(lambda: (loss.backward(), loss)[1], Tensor)
        self.optimizer.step()
        self.module.eval()

    def state(self) -> dict[str, Tensor]:
        """The module and its optimizer, for a checkpoint."""
        saved = {"steps": torch.tensor(self.steps)}
        saved |= {f"module {name}": x.clone() for name, x in self.module.state_dict().items()}
        for i, p in enumerate(parameters_of([self.optimizer])):
            slots = to_tensors(self.optimizer.state.get(p, {}))
            saved |= {f"optimizer {i} {slot}": x.clone() for slot, x in slots.items()}
        return saved

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a state; ValueError for that of another assistant."""
        tensors, weights = dict(saved), self.module.state_dict()
        read = entries(tensors, "module ")
        if read.keys() != weights.keys():
            raise ValueError(
                f"the sampler's checkpoint is of another assistant than {self.name}: resume with "
                "the one that it had, or begin another run"
            )
        for name, x in weights.items():
            check_tensor(f"module {name}", read[name], x.dtype, tuple(x.shape))
        self.module.load_state_dict(read)
        self.steps = int(check_tensor("steps", tensors["steps"], torch.int64, ()))
        for i, p in enumerate(parameters_of([self.optimizer])):
            self.optimizer.state.pop(p, None)
            if slots := entries(tensors, f"optimizer {i} "):
                model = optimizer_state(self.optimizer, p)
                self.optimizer.state[p] = from_tensors(model, slots)
