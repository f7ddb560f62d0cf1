"""PETRA: reversible blocks, delayed gradients, nothing stashed (Rivaud et al., 2406.02052)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from solvers.base import Batch, Block, GraphBytes, Links, PhaseStats
from solvers.blocks.norms import frozen_statistics
from solvers.delayed import Delayed, Flight, tensor_bytes
from solvers.layers.reversible import Reversible


@dataclass
class Petra(Delayed):
    r"""`Delayed` with d_k = 2 (K-1-k); all at the weights of the tick:

        x_k = f_k(x_{k-1}; w_k)                                   forward, sent up, nothing kept
        xt_{k-1} = f_k^{-1}(xt_k; w_k)                            what the input was, but for drift
        p_k = (d f_k / d x)^T p_{k+1},  dw_k  at xt_{k-1}         sent down with xt_{k-1}
        w_k <- optimiser step with the mean of `accumulate` such gradients

    Units that are not reversible (stem, downsampling, head) keep their inputs in a queue, d_k of
    them. So a block's memory does not grow with the reversible units in it. The backward pass goes
    unit by unit, and alone moves BatchNorm's running statistics. The last block does forward, loss
    and backward in one tick by ordinary back-propagation, so K = 1 is plain training bit for bit.
    """

    name: ClassVar[str] = "petra"

    accumulate: int = 1
    """Mini-batches a step of the weights; their gradients are averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate}; it must be at least 1")

    def delay(self, index: int, count: int) -> int:
        return 2 * super().delay(index, count)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        if index == count - 1:
            return graph(module, lam)
        x, queued, largest = lam, [], 0
        with torch.no_grad(), frozen_statistics(module):
            for part in _segments(module):
                if isinstance(part, Reversible):
                    largest = max(largest, graph(part.residual, x.chunk(2, dim=1)[0]))
                else:
                    largest = max(largest, graph(part, x))
                    queued.append(x)
                x = part(x)
        return largest + self.delay(index, count) * tensor_bytes(queued)

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:
        super().prepare(block, window_samples, exchanges)
        self._parts = _segments(block.module)
        self._gradients = 0

    def drain(self, block: Block, links: Links) -> None:
        super().drain(block, links)
        if self._gradients:
            self._average(block)

    def flight_state(self, block: Block, links: Links) -> dict[str, Tensor]:
        state = super().flight_state(block, links)
        if self._gradients:
            state["gradients"] = torch.tensor(self._gradients)
            for name, parameter in block.module.named_parameters():
                if parameter.grad is not None:
                    state[f"gradient {name}"] = parameter.grad
        return state

    def load_flight_state(self, block: Block, state: dict[str, Tensor]) -> None:
        super().load_flight_state(block, state)
        self._gradients = int(state.get("gradients", 0))
        for name, parameter in block.module.named_parameters():
            if f"gradient {name}" in state:
                parameter.grad = torch.empty_like(parameter).copy_(state[f"gradient {name}"])

    def _forward(self, block: Block, links: Links, lam: Tensor) -> Flight:
        kept: dict[str, Tensor] = {}
        x = lam
        with torch.no_grad(), frozen_statistics(block.module), block.numbers():
            for i, part in enumerate(self._parts):
                if not isinstance(part, Reversible):
                    kept[str(i)] = x
                x = part(x)
        links.to_next(x)
        return Flight(None, kept)

    def _again(self, block: Block, lam: Tensor | None, kept: dict[str, Tensor]) -> Flight:
        return Flight(None, kept)

    def _take(self, links: Links) -> tuple[Tensor, ...]:
        return links.from_next(), links.from_next()

    def _backward(self, block: Block, links: Links) -> None:
        kept = self._flights.popleft().kept
        x, p = self._adjoint(links)
        for i in reversed(range(len(self._parts))):
            part = self._parts[i]
            if isinstance(part, Reversible):
                with block.numbers():
                    x, p = part.reverse(x, p, _backward_of(block))
            else:
                wanted = not (block.first and i == 0)
                x = kept[str(i)].detach().requires_grad_(wanted)
                with block.numbers():
                    out = part(x)
                if out.requires_grad:
                    block.backward(out, p)
                if wanted:
                    p_in = block.input_adjoint(x)
                    assert p_in is not None
                    x, p = x.detach(), p_in
        if not block.first:
            links.to_previous(x)
            links.to_previous(p)
        self._step(block)

    def _turn(self, block: Block, links: Links, batch: Batch, stats: PhaseStats) -> None:
        lam = self._arrived(block, links, batch).detach().requires_grad_(not block.first)
        self._classified(block, block.forward(lam), batch, stats)
        if not block.first:
            p_in = block.input_adjoint(lam)
            assert p_in is not None
            links.to_previous(lam.detach())
            links.to_previous(p_in)
        self._step(block)

    def _step(self, block: Block) -> None:
        self._gradients += 1
        if self._gradients >= self.accumulate:
            self._average(block)

    def _average(self, block: Block) -> None:
        gradients = block.gradients()
        if self._gradients > 1 and gradients:
            torch._foreach_mul_(gradients, 1 / self._gradients)
        self._gradients = 0
        super()._step(block)


class _Copy(nn.Module):
    """Before what works in place: a queue's inputs must stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _segments(module: nn.Module) -> list[nn.Module]:
    """A block's reversible units, and runs of the others between them, in order."""
    found: list[nn.Module] = []
    run: list[nn.Module] = []
    # children() leaves out the second use of a module
    for part in [*module._modules.values(), None]:
        if part is None or isinstance(part, Reversible):
            if run:
                found.append(nn.Sequential(*run))
            run = []
            found += [part] if part is not None else []
        else:
            if not run and getattr(part, "inplace", False):
                run.append(_Copy())
            run.append(part)
    return found


def _backward_of(block: Block):  # type: ignore[no-untyped-def]
    def backward(x: Tensor, out: Tensor, p_out: Tensor) -> Tensor:
        block.backward(out, p_out.to(out.dtype) if block.scaler is None else p_out)
        p = block.input_adjoint(x)
        assert p is not None
        return p

    return backward
