"""What a PyTorch user writes on one device: the plain loop, and the loop that accumulates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybrid.bench.measure import CPU, Contender
from hybrid.method.optimizers import make_optimizer, output_weight
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Batch

Model = TypeVar("Model", bound=nn.Module)


class TorchContender(Contender):
    """What rows without this project's methods share: a network, its optimizer and a clock."""

    _model: Any
    """What this rank holds of the network; None where that is nothing."""

    def __init__(
        self, module: nn.Module, settings: OptimizerSettings, device: torch.device
    ) -> None:
        self._device = device
        self._optimizer = make_optimizer(module, settings, output_weight([module]))
        self._waited = self._sent = 0.0

    def spent(self) -> tuple[float, float]:
        return self._sent, self._waited

    def close(self) -> None:
        self._model = None
        self._optimizer.state.clear()
        self._optimizer.param_groups.clear()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Adds up wall time less the main thread's processor time.

        It means something with one compute thread only; on a machine shared with others it counts
        the time they had the core, too.
        """
        wall, busy = perf_counter(), thread_time()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._waited += max(0.0, (perf_counter() - wall) - (thread_time() - busy))

    def _step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_ratio"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class PlainLoop(TorchContender):
    """A hand-written loop on one rank, whose `here` is true; the other ranks return at once.

    The other ranks should sleep while it takes several `threads`, as in `Communicator.barrier`.
    With `micro_batches` it accumulates the gradients of so many parts of a mini-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSettings,
        threads: int = 1,
        micro_batches: int = 1,
        device: torch.device = CPU,
        here: bool = True,
    ) -> None:
        self._threads, self._micro_batches = threads, micro_batches
        self._model = prepared(model).to(device) if here else None
        super().__init__(self._model or nn.Module(), optimizer, device)

    def train(self, batches: Sequence[Batch]) -> None:
        if self._model is None:
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        with self._running():
            for batch in batches:
                x, y = batch.images(), batch.labels()
                parts = x.tensor_split(self._micro_batches), y.tensor_split(self._micro_batches)
                for inputs, labels in zip(*parts, strict=True):
                    loss = cross_entropy(self._model(inputs), labels)
                    (loss * (len(labels) / len(y)) if len(labels) < len(y) else loss).backward()
                self._step(batch.learning_rate)
        torch.set_num_threads(before)

    def state_dict(self) -> dict[str, Tensor] | None:
        return None if self._model is None else on_cpu(self._model.state_dict())


def prepared(model: Model) -> Model:
    """A copy of its own, channels_last and in training mode."""
    own = deepcopy(model).train()
    own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return own


def on_cpu(state: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of a state's tensors."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
