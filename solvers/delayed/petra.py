"""PETRA: delayed gradients in reversible blocks, without a stash (Rivaud et al., 2406.02052)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Needs
from hybrid.solvers.base import GraphBytes, program_of
from hybrid.solvers.delayed.base import NOT_COMPILED, Delayed, DelayedProgram, tensor_bytes
from hybrid.solvers.delayed.stash import Flight
from hybrid.solvers.layers.branches import Reversible
from hybrid.solvers.numerics.buffers import frozen_statistics


@dataclass(frozen=True)
class Petra(Delayed):
    r"""`Delayed` with d_k = 2 (K-1-k); all at the weights of the tick:

        x_k = f_k(x_{k-1}; w_k)                                   forward, sent up, nothing kept
        xt_{k-1} = f_k^{-1}(xt_k; w_k)                            the input, but for drift
        p_k = (d f_k / d x)^T p_{k+1},  dw_k  at xt_{k-1}         sent down with xt_{k-1}
        w_k <- optimizer step with the sum of dw_k over a mini-batch's micro-batches

    Units that are not reversible (stem, downsampling, head) keep their last d_k inputs in a queue.
    So a block's memory does not grow with the number of its reversible units. The backward pass
    goes unit by unit. It updates BatchNorm's running statistics; the forward pass does not. The
    last block does forward, loss and backward in one tick by ordinary back-propagation, so K = 1 is
    plain training bit for bit.
    """

    name: ClassVar[str] = "petra"

    needs: ClassVar = (
        Needs(
            "one tensor at a time goes into a block, because it turns units round so",
            lambda run: not run.setup.bundled,
            "choose another solver",
        ),
        NOT_COMPILED,
    )

    def delay(self, index: int, count: int) -> int:
        return 2 * super().delay(index, count)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, queued, largest = self.first_part(lam, count), [], 0
        if index == count - 1:
            return graph(module, x)
        with torch.no_grad(), frozen_statistics(module):
            for part in _segments(module):
                if isinstance(part, Reversible):
                    largest = max(largest, graph(part.residual, x.chunk(2, dim=1)[0]))
                else:
                    largest = max(largest, graph(part, x))
                    queued.append(x)
                x = part(x)
        return largest + self.delay(index, count) * tensor_bytes(queued)


@program_of(Petra)
class PetraProgram(DelayedProgram):
    """One rank's reversible units and the queues of the others."""

    solver: Petra

    def begin(self) -> None:
        super().begin()
        self._parts = _segments(self.block.module)

    def _forward(self, flight: Flight) -> Tensor:
        block, x, flight.lam = self.block, flight.lam, None
        self._draw_for(flight)
        spans = block.span("forward", flight.part.key)
        with spans, torch.no_grad(), frozen_statistics(block.module), block.numbers():
            for i, unit in enumerate(self._parts):
                assert x is not None
                if not isinstance(unit, Reversible):
                    flight.stash[str(i)] = x
                x = unit(x)
        assert x is not None
        return x

    def _draw_for(self, flight: Flight) -> None:
        if self.block.draws is not None:
            self.block.draws.draw_for(flight.part.key)

    def _receive_message(self) -> tuple[Tensor, ...]:
        return *super()._receive_message(), *super()._receive_message()

    def _backward(self, flight: Flight) -> Tensor | None:
        block, message = self.block, self._oldest_message()
        x = self._wire.receive(message, block.formats[-1])
        p = self._wire.receive_adjoint(message, block.formats[-1], flight.part.size)
        self._draw_for(flight)
        with block.span("backward", flight.part.key):
            x, p = self._reversed_pass(flight, x, p)
        flight.lam = x
        return None if block.first else p

    def _reversed_pass(self, flight: Flight, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """The block's input and its adjoint, from its output and its adjoint."""
        block = self.block
        for i, unit in reversed([*enumerate(self._parts)]):
            if isinstance(unit, Reversible):
                with block.numbers():
                    x, p = unit.reverse(x, p, self._branch_backward)
            else:
                wanted = not (block.first and i == 0)
                x = flight.stash[str(i)].detach().requires_grad_(wanted)
                with block.numbers():
                    out = unit(x)
                block.backward(out, p)
                if wanted:
                    x, p = x.detach(), block.input_adjoint(x)
        return x, p

    def _branch_backward(self, x: Tensor, out: Tensor, p_out: Tensor) -> Tensor:
        block = self.block
        block.backward(out, p_out.to(out.dtype) if block.scaler is None else p_out)
        return block.input_adjoint(x)

    def _send_adjoint(self, p_in: Tensor, flight: Flight) -> None:
        assert flight.lam is not None
        self._wire.send(self.links.to_previous, flight.lam.detach())
        super()._send_adjoint(p_in, flight)


class _Copy(nn.Module):
    """Protects the inputs in a queue from a unit that works in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _segments(module: nn.Module) -> list[nn.Module]:
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
