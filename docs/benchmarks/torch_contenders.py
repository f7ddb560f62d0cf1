"""torch's own ways to train on several ranks, as rows of a bench: see torch_rows.py."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore, pipelining  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hybrid.bench.contenders import CPU, Contender, prepared, take_step
from hybrid.method.optimizers import find_vectors, make_optimizer
from hybrid.networks.partition.split import split
from hybrid.networks.units import BlockModule, Chain
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Batch
from hybrid.solvers.base import Shape

SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved-zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}
"""torch's class for each kind, and the stages that a rank has under it."""


class TorchContender(Contender):
    """What the rows here share: a network, its optimizer and a clock."""

    _model: Any

    def __init__(
        self, module: nn.Module, settings: OptimizerSettings, device: torch.device
    ) -> None:
        self._device = device
        self._optimizer = make_optimizer(module, settings, find_vectors(module).values())
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
                take_step(self._optimizer, batch.learning_rate)
                self._sent += self._bytes_a_step

    def state_dict(self) -> dict[str, Tensor] | None:
        return on_cpu(self._model.module.state_dict()) if dist.get_rank() == 0 else None


class Pipeline(TorchContender):
    """torch.distributed.pipelining over this project's own cuts, balanced by operations.

    `kind` is "gpipe", "1f1b" (a stage a rank) or "interleaved-zero-bubble" (two). With K ranks
    stage s is on rank s mod K. BatchNorm normalizes by the micro-batch.
    The schedules take the mean loss of a micro-batch and divide the summed gradients by the number
    of micro-batches (torch's `scale_grads`, on by default): the gradient of the batch's mean loss.

    Raises ValueError for more stages than units, a number of micro-batches that the schedule has no
    order for; `train` for one that does not divide the mini-batch.
    """

    def __init__(
        self,
        model: Chain,
        optimizer: OptimizerSettings,
        kind: str,
        micro_batches: int,
        device: torch.device = CPU,
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        _check_order(kind, micro_batches, size)
        self._make, stages_a_rank = SCHEDULES[kind]
        self._micro_batches = micro_batches
        self._names = list(model.state_dict())
        model = prepared(model)
        self._num_stages = size * stages_a_rank
        blocks = split(model, self._num_stages, inside=False)
        sample = torch.zeros(1, *model.input_shape).to(memory_format=torch.channels_last)
        # one sample's shape: the image's, at every cut, the logits'
        cuts = blocks.cut_shapes(sample)
        self._shapes: list[Shape] = [tuple(model.input_shape), *cuts, (model.classes,)]
        self._mine = range(rank, self._num_stages, size)
        self._modules: list[BlockModule] = [blocks.module(i).to(device) for i in self._mine]
        super().__init__(nn.ModuleList(self._modules), optimizer, device)
        # torch does not tell: an activation leaves at the end of every stage of this rank for
        # another, and a gradient at its beginning
        sending = [*self._mine, *(i + 1 for i in self._mine)]
        cut = range(1, self._num_stages) if size > 1 else range(0)
        sent = sum(prod(self._shapes[i]) for i in sending if i in cut)
        self._bytes_a_sample = sample.element_size() * sent
        self._schedules: dict[int, Any] = {}

    def train(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            check_divides(self._micro_batches, "micro-batches", batch)
        first, last = 0 in self._mine, self._num_stages - 1 in self._mine
        with self._running():
            for batch in batches:
                schedule = self._schedule(len(batch))
                images = (batch.images(),) if first else ()
                schedule.step(*images, target=batch.labels() if last else None)
                take_step(self._optimizer, batch.learning_rate)
                self._sent += self._bytes_a_sample * len(batch)

    def state_dict(self) -> dict[str, Tensor] | None:
        local = {
            module.global_name(name): tensor
            for module in self._modules
            for name, tensor in on_cpu(module.state_dict()).items()
        }
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local)
        whole = dict(ChainMap(*parts))
        return {name: whole[name] for name in self._names} if dist.get_rank() == 0 else None

    def close(self) -> None:
        self._schedules.clear()
        self._modules.clear()
        super().close()

    def _schedule(self, batch_size: int) -> Any:
        """The schedule for mini-batches of this size: torch's receive buffers have fixed shapes."""
        if batch_size not in self._schedules:
            samples = batch_size // self._micro_batches
            stages = [self._stage(i, samples) for i in self._mine]
            several = self._make is pipelining.ScheduleInterleavedZeroBubble
            self._schedules[batch_size] = self._make(
                stages if several else stages[0], self._micro_batches, loss_fn=cross_entropy
            )
        return self._schedules[batch_size]

    def _stage(self, index: int, samples: int) -> ChannelsLastStage:
        """Stage `index` for micro-batches of `samples`.

        With both shapes given torch takes them as they are. Without, it finds them by a training
        pass, which would move BatchNorm's running statistics, and takes the gradients' strides
        from a pass that starts at contiguous ones, which are not the strides of real gradients.
        """
        return ChannelsLastStage(
            self._modules[self._mine.index(index)],
            index,
            self._num_stages,
            self._device,
            input_args=_example((samples, *self._shapes[index]), requires_grad=index > 0),
            output_args=_example((samples, *self._shapes[index + 1]), requires_grad=True),
        )


class ChannelsLastStage(pipelining.PipelineStage):
    """A stage whose cuts are channels_last.

    Gloo refuses to send such a tensor ("input tensor has to be contiguous"), and NCCL sends its
    memory whatever the receiver's order is. So both ends hand over the (N, H, W, C) view of it,
    which is contiguous: no copy, and the order is agreed on. Making the view here and not in the
    module keeps stage outputs from being views, which the zero-bubble schedule cannot detach.
    """

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _in_memory_order(super().get_fwd_recv_ops(fwd_chunk_id), sends=False)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _in_memory_order(super().get_bwd_recv_ops(bwd_chunk_id), sends=False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _in_memory_order(super().get_fwd_send_ops(fwd_chunk_id), sends=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _in_memory_order(super().get_bwd_send_ops(bwd_chunk_id), sends=True)


def on_cpu(state: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of a state's tensors."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def process_group(comm: Any, device: torch.device = CPU) -> None:
    """Initialize torch.distributed over the ranks of an mpi4py communicator. All must call it.

    Rank 0 listens at MASTER_ADDR and MASTER_PORT, else at a free port of 127.0.0.1 (of its host's
    name where there are several hosts). Unless GLOO_SOCKET_IFNAME is set it becomes the interface
    that leads to rank 0.
    """
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    alone = bool(comm.allreduce(host.size == comm.size, op=MPI.LAND))
    host.Free()
    # rank 0 keeps the port it is given, so nobody can take it before the others connect
    store = place = None
    if comm.rank == 0:
        name = "127.0.0.1" if alone else MPI.Get_processor_name()
        address = os.environ.get("MASTER_ADDR") or name
        port = int(os.environ.get("MASTER_PORT") or 0)
        store = TCPStore(address, port, comm.size, is_master=True, wait_for_workers=False)
        place = (address, store.port)
    address, port = comm.bcast(place)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        local = probe.getsockname()[0]
    towards = next((name for name, there in interfaces().items() if there == local), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", towards)
    if store is None:
        store = TCPStore(address, port, comm.size, is_master=False)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)


def check_divides(parts: int, what: str, batch: Batch) -> None:
    """ValueError unless a mini-batch can be cut into so many equal parts."""
    if len(batch) % parts:
        near = parts * max(1, len(batch) // parts)
        raise ValueError(
            f"{parts} {what} do not divide a batch of {len(batch)}: take a batch of {near}"
        )


def _check_order(kind: str, micro_batches: int, size: int) -> None:
    """Raise what torch's schedules would, before any is made."""
    if kind == "1f1b" and micro_batches < size:
        raise ValueError(f"1f1b on {size} ranks needs at least {size} micro-batches")
    rounds = max(1, micro_batches // size)
    if kind == "interleaved-zero-bubble" and micro_batches % rounds:
        raise ValueError(
            f"interleaved-zero-bubble runs {micro_batches} micro-batches on {size} ranks in "
            f"{rounds} rounds, which do not divide them: take a multiple of {size}"
        )


def _example(shape: Shape, requires_grad: bool) -> Tensor:
    """A tensor that only tells its format."""
    channels_last = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    empty = torch.empty(shape, device="meta", memory_format=channels_last)
    return empty.requires_grad_(requires_grad)


def _in_memory_order(operations: list[dist.P2POp], sends: bool) -> list[dist.P2POp]:
    for operation in operations:
        tensor = operation.tensor.detach()
        tensor = tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor
        # what is received is not made contiguous: a copy would receive what nobody reads
        operation.tensor = tensor.contiguous() if sends else tensor
    return operations


def interfaces() -> dict[str, str]:
    """The IPv4 address of every network interface that has one, by the interface's name."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
