"""Backward passes of reversible units, which compute their inputs from their outputs."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.policies import BackwardPolicy, Receive
from hybrid.solvers.layers.branches import Reversible
from hybrid.solvers.numerics.buffers import frozen_statistics


class Reverse(BackwardPolicy):
    """Backward passes run on inputs that are computed from x_k, which the next block sends back.

    Units that are not reversible keep their inputs. All passes are at the newest weights.
    """

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.parts = segments(block.module)

    def forward(self, flight: Flight) -> Any:
        block, x, flight.lam = self.block, flight.lam, None
        self._draw_for(flight)
        spans = block.span("forward", flight.part.key)
        with spans, torch.no_grad(), frozen_statistics(block.module), block.numbers():
            for i, unit in enumerate(self.parts):
                assert x is not None
                if not isinstance(unit, Reversible):
                    flight.stash[str(i)] = x
                x = unit(x)
        assert x is not None
        return x

    def backward(self, flight: Flight, receive: Receive) -> Any:
        block = self.block
        p, x = receive(block.formats[-1]), flight.returned
        if p is None:
            return None
        assert x is not None
        self._draw_for(flight)
        with block.span("backward", flight.part.key):
            for i, unit in reversed([*enumerate(self.parts)]):
                if isinstance(unit, Reversible):
                    with block.numbers():
                        x, p = unit.reverse(x, p, self._branch_backward)
                    continue
                wanted = block.sends_adjoint or i > 0
                x = flight.stash[str(i)].detach().requires_grad_(wanted)
                with block.numbers():
                    out = unit(x)
                block.backward(out, p)
                if wanted:
                    x, p = x.detach(), block.input_adjoint(x)
        flight.lam = x
        return p if block.sends_adjoint else None

    def _draw_for(self, flight: Flight) -> None:
        if self.block.draws is not None:
            self.block.draws.draw_for(flight.part.key)

    def _branch_backward(self, x: Tensor, out: Tensor, p_out: Tensor) -> Any:
        block = self.block
        block.backward(out, p_out.to(out.dtype) if block.scaler is None else p_out)
        return block.input_adjoint(x)


class _Copy(nn.Module):
    """Protects the inputs in a queue from a unit that works in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def segments(module: nn.Module) -> list[nn.Module]:
    """A block's reversible units, and runs of the others between them, in order."""
    segments: list[nn.Module] = []
    # children() leaves out the second use of a module
    for kind, run in groupby(module._modules.values(), lambda part: isinstance(part, Reversible)):
        parts = [part for part in run if part is not None]
        if kind:
            segments += parts
        else:
            before = [_Copy()] if getattr(parts[0], "inplace", False) else []
            segments.append(nn.Sequential(*before, *parts))
    return segments
