"""Whether parts of a network, one after the other, give the outputs and gradients of the whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.errors import code_line, one_line
from hybrid.networks.units import mode
from hybrid.solvers.checks.constant_draws import ConstantDraws
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.numerics.attributes import restored_attributes, user_modules

SMALL = 2**16
"""Bytes up to which the gradient of a parameter is compared."""
NEAR, FLOOR = 1e-3, 1e-5
"""The largest difference of a tensor over its norm, and over that of the largest one."""


class CutCheck:
    """Compares passes of parts of a network with one of the whole, in evaluation mode."""

    def __init__(self, network: nn.Module, inputs: Any) -> None:
        self.network, self.inputs = network, inputs
        self.expected: list[Tensor] | None = None
        """The outputs and gradients of the network; None: it has none that could be compared."""
        with suppress(Exception):  # whatever a backward pass does; the proof of a run says it
            self.expected = self._pass(lambda: _weigh(call_network(network, inputs)))

    def fault(self, stages: Sequence[nn.Module]) -> tuple[str, int | None]:
        """What is wrong with a network's stages, or "", and the index of the stage that fails."""
        links: list[tuple[Any, Any]] = []
        try:
            outputs = self._pass(lambda: self._run(stages, links))
        except Exception as error:  # whatever code does without numbers
            index = len(links) if len(links) < len(stages) else None
            reason = ": ".join(filter(None, (code_line(error, True), one_line(error)[:160])))
            if "in-place" in reason:
                text = reason.rstrip(".")
                return f"{text}: let that code create a new tensor, or cut elsewhere", index
            return (
                f"its forward needs what only a part of it computes ({reason}); move that code "
                "into a separate module, or cut elsewhere"
            ), index
        if self.expected is None or _are_near(outputs, self.expected):
            return "", None
        return (
            "its parts give other numbers or gradients than its forward, as beside a "
            "torch.autograd.Function, a checkpoint with use_reentrant=True, or code that takes a "
            "gradient or that torch cannot watch: move that code into a separate module, or cut "
            "elsewhere"
        ), None

    def _pass(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The outputs of a pass, then the gradients of the parameters."""
        with (
            mode(self.network, False),
            torch.enable_grad(),
            ConstantDraws(),
            _gradients(self.network) as parameters,
        ):
            outputs = [_number(x.detach()) for x in run()]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            return [*outputs, *(g.to_dense() for g in gradients)]

    def _run(self, stages: Sequence[nn.Module], links: list[tuple[Any, Any]]) -> list[Tensor]:
        """The outputs of stages, and their backward passes; `links`: what goes in and out."""
        out = self.inputs
        for i, stage in enumerate(stages):
            value = tree_map(_leaf, out) if i else out
            with restored_attributes(user_modules(self.network).values()):  # each block has its own
                out = stage(value) if i else call_network(stage, value)
            links.append((value, out))
        outputs = _weigh(out)
        for (_, left), (entered, _) in reversed([*pairwise(links)]):
            both = zip(tree_leaves(left), tree_leaves(entered), strict=True)
            if pairs := [(x, y.grad) for x, y in both if y.grad is not None and x.requires_grad]:
                torch.autograd.backward([x for x, _ in pairs], [p for _, p in pairs])
        return outputs


def _number(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.double()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


def _weigh(out: Any) -> list[Tensor]:
    """The tensors of an output, after the backward pass of a sum of them with unequal weights."""
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    total = torch.zeros(())
    for x in outputs:
        if x.requires_grad:
            flat = (torch.view_as_real(x) if x.is_complex() else x).flatten().cpu()
            total = total + (flat * torch.linspace(0.5, 1.5, len(flat), dtype=flat.dtype)).sum()
    if total.requires_grad:
        total.backward()
    return outputs


@contextmanager
def _gradients(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Within it small parameters alone get gradients; afterwards all have what they had."""
    before = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for p, _, trained in before:
        p.grad = None
        p.requires_grad_(trained and p.nbytes <= SMALL)
    try:
        yield [p for p in model.parameters() if p.requires_grad]
    finally:
        for p, gradient, trained in before:
            p.requires_grad_(trained)
            p.grad = gradient


def _are_near(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether tensors are the same but for rounding, as far as they are numbers."""
    sizes = [float(y.abs().max()) if y.numel() else 0.0 for y in expected]
    if not all(map(isfinite, sizes)):
        return True  # such as weights that stand for those of another rank
    bounds = (NEAR * size + FLOOR * max(sizes) for size in sizes)
    return len(outputs) == len(expected) and all(
        x.shape == y.shape and (not y.numel() or float((x - y).abs().max()) <= bound)
        for x, y, bound in zip(outputs, expected, bounds, strict=True)
    )
