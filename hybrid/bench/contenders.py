"""The rows of a bench: a plain PyTorch loop on one device, and this package's methods."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.method.optimizers import find_vectors, make_optimizer
from hybrid.networks.units import set_mode
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Batch, Block, Window

Model = TypeVar("Model", bound=nn.Module)
CPU = torch.device("cpu")


class Contender(Protocol):
    """A row of the table: one way to train the network. Every rank has one."""

    def train(self, batches: Sequence[Batch]) -> None:
        """Take one step for each mini-batch; every rank calls it with the same mini-batches."""

    def spent(self) -> tuple[float, float]:
        """Return the bytes this rank has sent and the seconds it has waited in `train`."""
        return 0.0, 0.0

    def close(self) -> None:
        """Free the network and its links."""
        return


class PlainLoop(Contender):
    """A hand-written loop on the rank with `here`; the other ranks return at once.

    The other ranks should sleep while it uses several `threads`, as in `Communicator.barrier`.
    With `micro_batches` it accumulates the gradients of that many parts of a mini-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSettings,
        threads: int = 1,
        micro_batches: int = 1,
        device: torch.device = CPU,
        here: bool = True,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self._threads, self._micro_batches = threads, micro_batches
        self.model = prepared(model).to(device) if here else nn.Module()
        self._here, self._device, self._precision = here, device, precision
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
        self._optimizer = make_optimizer(self.model, optimizer, find_vectors(self.model).values())

    def train(self, batches: Sequence[Batch]) -> None:
        if not self._here:
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        rounds = self._precision is not torch.float32
        for batch in batches:
            x, y = batch.images(), batch.labels()
            parts = x.tensor_split(self._micro_batches), y.tensor_split(self._micro_batches)
            for inputs, labels in zip(*parts, strict=True):
                with torch.autocast(self._device.type, self._precision, enabled=rounds):
                    loss = cross_entropy(self.model(inputs).float(), labels)
                loss = loss * (len(labels) / len(y)) if len(labels) < len(y) else loss
                self._scaler.scale(loss).backward()
            take_step(self._optimizer, batch.learning_rate, self._scaler)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        torch.set_num_threads(before)


def prepared(model: Model) -> Model:
    """Copy a model, channels_last and in training mode."""
    copy = deepcopy(model)
    set_mode(copy, training=True)
    copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return copy


def take_step(
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Move the weights, each group at its ratio of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_ratio"]
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


class MethodContender(Contender):
    """A method on this rank of a grid, with its own weights; its links count bytes and waits."""

    def __init__(
        self, method: Method, links: RankLinks, prepare: Callable[[Block], None] | None = None
    ) -> None:
        """`prepare` is called with the block before anything runs or is timed on it."""
        self.links = links
        self.method = method.copied().of_replica(links.place)
        self.block = self.method.block(links)
        if prepare is not None:
            prepare(self.block)
        self.rounds = self.method.start(self.block, links)

    def train(self, batches: Sequence[Batch]) -> None:
        length, sweeps = self.method.setup.window, self.method.setup.sweeps
        place = self.links.place
        shares = [batch.of_replica(place.replica, place.replicas) for batch in batches]
        starts = range(0, len(shares), length)
        windows = [Window(shares[start : start + length], sweeps) for start in starts]
        self.rounds.run([(window, window) for window in windows], 0, 0)

    def spent(self) -> tuple[float, float]:
        return self.links.traffic.total_bytes, self.links.traffic.total_waiting

    def close(self) -> None:
        self.links.close()
