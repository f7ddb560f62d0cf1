"""What a PyTorch user would use otherwise: the plain loop, and DistributedDataParallel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hybrid.bench.measure import CPU, Contender
from hybrid.bench.processes import compute_threads
from hybrid.optimizers.making import make
from hybrid.settings.config import OptimizerSettings
from solvers import Batch

Model = TypeVar("Model", bound=nn.Module)


class TorchContender(Contender):
    """What torch's own ways share: a network of their own, its optimizer and a clock."""

    _model: Any
    """What this rank holds of the network; None where that is nothing."""

    def __init__(
        self, module: nn.Module, settings: OptimizerSettings, device: torch.device
    ) -> None:
        self._device = device
        self._optimizer = make(module, settings)
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
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class PlainLoop(TorchContender):
    """A hand-written loop on rank 0 alone; the other ranks return at once.

    With more `threads` than the cores this process is bound to, it takes all of the host's for as
    long as it trains. The other ranks should sleep meanwhile, not poll: `dist.barrier` sleeps.
    With `micro_batches` it accumulates the gradients of so many parts of a mini-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSettings,
        threads: int = 1,
        device: torch.device = CPU,
        micro_batches: int = 1,
    ) -> None:
        self._threads, self._micro_batches = threads, micro_batches
        alone = not dist.is_initialized() or dist.get_rank() == 0
        self._model = prepared(model).to(device) if alone else None
        super().__init__(self._model or nn.Module(), optimizer, device)

    def train(self, batches: Sequence[Batch]) -> None:
        if self._model is None:
            return
        with compute_threads(self._threads), self._running():
            for batch in batches:
                x, y = batch.images(), batch.labels()
                parts = x.tensor_split(self._micro_batches), y.tensor_split(self._micro_batches)
                for inputs, labels in zip(*parts, strict=True):
                    loss = cross_entropy(self._model(inputs), labels)
                    (loss * (len(labels) / len(y)) if len(labels) < len(y) else loss).backward()
                self._step(batch.learning_rate)

    def state_dict(self) -> dict[str, Tensor] | None:
        return None if self._model is None else on_cpu(self._model.state_dict())


class DataParallel(TorchContender):
    """DistributedDataParallel: rank r trains on the r-th of K equal parts of every mini-batch.

    BatchNorm normalizes by a rank's own part; torch's default copies rank 0's running statistics
    to everyone before every step, and they are what `state_dict` gives. `train` raises ValueError
    for a mini-batch that K does not divide, since gradients are averaged over ranks.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSettings, device: torch.device = CPU
    ) -> None:
        self._model = DistributedDataParallel(
            prepared(model).to(device), device_ids=[device] if device.type == "cuda" else None
        )
        super().__init__(self._model, optimizer, device)
        trained = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        size = dist.get_world_size()
        # torch does not tell: a ring all-reduce; rank 0's copies of the statistics are not counted
        self._bytes_a_step = 2 * (size - 1) / size * trained

    def train(self, batches: Sequence[Batch]) -> None:
        size = dist.get_world_size()
        for batch in batches:
            check_divides(size, "ranks", batch)
        with self._running():
            for batch in batches:
                ids = batch.ids.chunk(size)[dist.get_rank()]
                out = self._model(batch.source.images(ids, batch.step))
                cross_entropy(out, batch.source.labels(ids, batch.step)).backward()
                self._step(batch.learning_rate)
                self._sent += self._bytes_a_step

    def state_dict(self) -> dict[str, Tensor] | None:
        return on_cpu(self._model.module.state_dict()) if dist.get_rank() == 0 else None


def prepared(model: Model) -> Model:
    """A copy of its own, channels_last and in training mode."""
    own = deepcopy(model).train()
    own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return own


def on_cpu(state: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of a state's tensors."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def check_divides(parts: int, what: str, batch: Batch) -> None:
    """ValueError unless a mini-batch can be cut into so many equal parts."""
    if len(batch) % parts:
        near = parts * max(1, len(batch) // parts)
        raise ValueError(
            f"{parts} {what} do not divide a batch of {len(batch)}: take a batch of {near}"
        )
