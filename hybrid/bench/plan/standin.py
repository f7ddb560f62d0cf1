"""Units that take as long as the real ones and compute nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid.bench.plan.device import Device
from hybrid.links.virtual import VirtualLinks
from hybrid.networks.blocks import Blocks
from hybrid.networks.units import Unit, make_single_unit_blocks
from hybrid.solvers.base import Shape
from hybrid.solvers.block import Block
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.local_work.budget import Cost

MESSAGE_OPERATIONS = 4
"""The cost of a message to each of its ranks, in operations: Python and mpi4py take 16 microseconds
to send one and 18 to receive it."""


class StandIn(nn.Module):
    """A unit with real weights and output shapes; the time of a pass comes from a table.

    Everything around the passes is real: messages, number formats, stores, weight steps. So a
    method's program runs on stand-ins as on the network, and virtual links measure its time
    without the passes, which are most of the work.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        shape: Shape,
        sizes: Sequence[int],
        costs: Sequence[Cost],
        dtype: torch.dtype = torch.float32,
        outputs: Bundle | None = None,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList({id(p): p for p in weights}.values())
        self.shape, self.sizes = shape, np.array(sizes)
        self.seconds = [np.array(each) for each in zip(*costs, strict=True)]
        """Seconds per sample, forward and backward, at each of the sizes."""
        self.dtype, self.outputs = dtype, outputs
        """The bundle of the network's outputs, for a last unit that gives several tensors."""
        self.links: VirtualLinks | None = None
        """The links whose clock counts the passes; None: no clock."""

    def forward(self, x: Tensor) -> Any:
        out: Tensor = _TimedPass.apply(self, x, *self.weights)  # type: ignore[no-untyped-call]
        return out if self.outputs is None else self.outputs.unpack(out)

    @contextmanager
    def spending(self, way: int, samples: int) -> Iterator[None]:
        """Count the time of a forward (0) or backward (1) pass instead of the body's."""
        start = 0.0 if self.links is None else self.links.now()
        yield
        if self.links is not None:
            spent = samples * float(np.interp(samples, self.sizes, self.seconds[way]))
            self.links.work(start + self.links.pace * spent - self.links.now())

    def blank(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return zeros that share one element of memory, and must not be written to."""
        return torch.zeros((), dtype=dtype).expand(shape)


class _TimedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: StandIn, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.unit, ctx.shape, ctx.dtype, ctx.like = unit, tuple(x.shape), x.dtype, weights
        with unit.spending(0, len(x)):
            return unit.blank((len(x), *unit.shape), unit.dtype)

    @staticmethod
    def backward(ctx: Any, *p_out: Tensor) -> Any:
        _, wanted, *trained = ctx.needs_input_grad
        pairs = zip(ctx.like, trained, strict=True)
        with ctx.unit.spending(1, len(p_out[0])):
            gradients = [torch.zeros_like(w) if is_trained else None for w, is_trained in pairs]
            return None, ctx.unit.blank(ctx.shape, ctx.dtype) if wanted else None, *gradients


def stand_in(blocks: Blocks, table: Mapping[int, Sequence[Cost]], inputs: Tensor) -> Blocks:
    """Replace every unit by a stand-in; `table`: samples per pass -> each unit's cost.

    `inputs` are a few rows, packed for the first block.
    """
    sizes, stand_ins, x = sorted(table), [], inputs
    modules = make_single_unit_blocks(blocks.units)
    with blocks.mode(training=False), torch.no_grad():
        for i, (unit, module) in enumerate(zip(blocks.units, modules, strict=True)):
            x, outputs = module(x), None
            if i == len(modules) - 1 and (outputs := Bundle.of(x, len(inputs), "the output")):
                x = outputs.pack(x)
            costs, weights = [table[size][i] for size in sizes], unit.parameters().values()
            stand_ins.append(StandIn(weights, tuple(x.shape[1:]), sizes, costs, x.dtype, outputs))
    named = [
        Unit(unit.name, {str(i): module})
        for i, (unit, module) in enumerate(zip(blocks.units, stand_ins, strict=True))
    ]
    return replace(blocks, model=nn.Sequential(*stand_ins), units=named, modes=None)


def clocked(links: VirtualLinks, device: Device | None, block: Block) -> None:
    """Let a rank's clock count the passes of its stand-ins.

    For a device it counts passes, messages and optimizer steps, but no time of this machine.
    """
    for part in block.module.modules():
        if isinstance(part, StandIn):
            part.links = links
    if device is None:
        return
    message = links.pace * MESSAGE_OPERATIONS * device.roofline.seconds_per_operation
    links.ignore_machine_time(message)

    def count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        seconds = device.step_seconds([p for p in weights if p.grad is not None])
        links.work(links.pace * seconds)

    for optimizer in {id(each): each for each in block.optimizers.values()}.values():
        optimizer.register_step_pre_hook(count_step)
