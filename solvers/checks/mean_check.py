"""Check that the loss of a mini-batch is the mean of its parts' losses."""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hybrid.solvers.block import Block
from hybrid.solvers.checks.constant_draws import ConstantDraws
from hybrid.solvers.checks.part_norms import normalized_by_parts
from hybrid.solvers.checks.traces import graph_leaves, untraced
from hybrid.solvers.layers.bundle import packed
from hybrid.solvers.metrics import detached
from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.peers import Peers

EVERY = 32
"""Steps between checks, besides the first mini-batch of every epoch."""
TOLERANCES = {torch.float64: 1e-8, torch.float32: 3e-5}
TOLERANCE_IN_16_BITS = 1e-2
"""The largest relative difference from the parts' losses, by number format."""


LEAST = 4
"""The smallest share that is checked in halves: BatchNorm needs two samples."""
MOST_NUMBERS = 1 << 24
"""The most numbers in all replicas' outputs for which these are compared at once."""


class MeanCheck:
    r"""Checks on the last block, for a mini-batch or a replica's share, in parts j of n_j samples:

        L(o_1 .. o_m) = sum_j (n_j / N) L_j,   L_j the training loss of part j

    Outputs without a row for each sample, such as a loss that the network computes, are recomputed
    from all samples at once. A share that is not divided is checked in two halves. If all replicas
    step together, the first checks the outputs of all of them, unless they are large.
    """

    def __init__(self, block: Block, steps: int, network: Container[int] = ()) -> None:
        self.block, self.steps = block, steps
        """Mini-batches per epoch."""
        self.network = network
        """Ids of modules that other blocks may be changing."""
        self._parts: list[tuple[MicroBatch, Tensor, Any, Tensor]] = []

    def take(self, part: MicroBatch, lam: Any, out: Any, loss: Tensor) -> None:
        """Add a part's input, output and loss; the last part runs the check, with ValueError."""
        if part.step % self.steps and part.step % EVERY:
            return
        self._check_weights(part, loss)
        lam = packed(lam, self.block.bundles[0]).detach()
        self._parts.append((part, lam, detached(out), loss.detach()))
        if not part.is_last:
            return
        parts, self._parts = self._parts, []
        if len(parts) > 1 or part.size > part.samples:  # the same on all replicas
            self._compare(parts)

    def _check_weights(self, part: MicroBatch, loss: Tensor) -> None:
        weights = {p.data_ptr() for p in self.block.module.parameters()}
        for leaf in graph_leaves(loss):
            if isinstance(leaf, nn.Parameter) and leaf.data_ptr() not in weights:
                raise ValueError(
                    f"the loss of step {part.step} reads a weight of shape {tuple(leaf.shape)} "
                    "that is not in the last block: give regularizer= for penalties on weights, or "
                    "take 1 block and 1 replica"
                )

    def _compare(self, parts: list[tuple[MicroBatch, Tensor, Any, Tensor]]) -> None:
        block, objective = self.block, self.block.objective
        count, first = parts[0][0].samples, parts[0][0]
        labels = torch.cat([part.labels for part, *_ in parts if part.labels is not None])
        weights = [part.weight for part, *_ in parts if part.weight is not None]
        weight = torch.stack(weights).sum() if weights else None
        sizes = [part.stop - part.start for part, *_ in parts]
        outputs = [out for _, _, out, _ in parts]
        with torch.no_grad(), untraced(objective.loss, self.network):
            losses = [loss for *_, loss in parts]
            if len(parts) == 1 and count >= LEAST:
                sizes = [count // 2, count - count // 2]
            if len(sizes) > len(parts) or not _has_rows(outputs[0], sizes[0]):
                outputs, whole = self._pass(torch.cat([lam for _, lam, *_ in parts]), sizes)
                losses = [
                    objective.mean_of(o, y, None if weight is None else weight * (len(y) / count))
                    for o, y in zip(outputs, labels.split(sizes), strict=True)
                ]
            else:
                whole = tree_map(lambda *rows: torch.cat(rows), *outputs)
                part_weight = weights[0] if weights else None
                again = objective.mean_of(outputs[0], labels[: sizes[0]], part_weight)
                if not torch.isclose(again, losses[0], rtol=1e-5, atol=1e-8):
                    return  # the loss has written to the output
            at_once = float(objective.mean_of(whole, labels, weight))
        terms = [float(x) * n / count for x, n in zip(losses, sizes, strict=True)]
        self._judge(count, first.step, at_once, terms, losses[0].dtype)
        if block.sync is not None and block.sync.strategy.exact:
            self._compare_replicas(block.sync.peers, first, whole, labels, weight, sum(terms))

    def _compare_replicas(
        self,
        peers: Peers,
        part: MicroBatch,
        whole: Any,
        labels: Tensor,
        weight: Tensor | None,
        mean: float,
    ) -> None:
        """Check the samples of a step on all replicas likewise."""
        objective, count = self.block.objective, len(labels)
        leaves, structure = tree_flatten(whole)
        rows = [*leaves, labels] if _has_rows(whole, count) else []
        width = sum(x[0].numel() for x in rows)
        share = torch.tensor([width, count, mean], dtype=torch.float64)
        shares = torch.stack(peers.exchange([share] * peers.replicas)())
        if not width or (shares[:, 0] != width).any() or width * part.size > MOST_NUMBERS:
            return
        columns = []
        for x in rows:
            pieces = [x.contiguous() if r == 0 else x[:0] for r in range(peers.replicas)]
            columns.append(torch.cat(peers.exchange(pieces)()))
        if peers.replica:
            return
        *leaves, labels = columns
        total = None if weight is None else weight * (part.size / count)
        with torch.no_grad(), untraced(objective.loss, self.network):
            at_once = float(objective.mean_of(tree_unflatten(leaves, structure), labels, total))
        terms = (shares[:, 1] * shares[:, 2] / part.size).tolist()
        self._judge(part.size, part.step, at_once, terms, torch.float32)

    def _judge(
        self, count: int, step: int, at_once: float, terms: Sequence[float], dtype: torch.dtype
    ) -> None:
        """Raise ValueError unless the loss of `count` samples is the sum of these terms."""
        tolerance = TOLERANCE_IN_16_BITS
        if self.block.precision is torch.float32:
            tolerance = TOLERANCES.get(dtype, tolerance)
        if abs(at_once - sum(terms)) > tolerance * sum(map(abs, terms)):
            raise ValueError(
                f"the loss of {count} samples of step {step} is {at_once:.6g}, but the mean over "
                f"its parts, which is trained, is {sum(terms):.6g}: give the loss's divisor "
                "(denominator=), or train undivided, with 1 micro-batch and 1 replica"
            )

    def _pass(self, lam: Tensor, sizes: list[int]) -> tuple[list[Any], Any]:
        """Compute the outputs of parts and of all samples at once, without side effects."""
        module = self.block.module
        rows = [*torch.arange(len(lam)).split(sizes)]

        def once(x: Tensor) -> Any:
            with frozen_statistics(module), ConstantDraws():
                return self.block.forward(x.clone())

        outputs = [once(part) for part in lam.split(sizes)]
        with normalized_by_parts(module, [rows], len(lam)):
            return outputs, once(lam)


def _has_rows(out: Any, count: int) -> bool:
    """Whether all leaves of an output are tensors with a row for each sample."""
    return all(isinstance(x, Tensor) and x.shape[:1] == (count,) for x in tree_leaves(out))
