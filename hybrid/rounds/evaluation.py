"""Measuring a network: on a validation set while it is trained, and on a test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.data import Data, Dataset
from hybrid.errors import AgreedError
from hybrid.links import RankLinks
from hybrid.rounds.phase_report import DivergedError, Scores
from hybrid.rounds.spoilt_samples import SpoiltSamples
from hybrid.solvers.block import Block
from hybrid.solvers.objective import Objective

TOGETHER = 4
"""Mini-batches of an evaluation after which the first block waits for the last one."""
SETS = ("validation", "test")
"""The sets on which a network is measured; the first there is decides."""
IMAGES = 500
"""Samples of a mini-batch of an evaluation on images of this package."""


@dataclass(frozen=True)
class Evaluation:
    """The validation and the test set of a run, each with its objective, as far as there are any.

    Where there is a validation set it decides which weights are best, and the test set is measured
    once, at the end.
    """

    links: RankLinks
    sets: Mapping[str, tuple[Data, Objective]]
    batch_size: int
    watch: Callable[[int, int], None] = lambda done, total: None
    """As in `measure_network`."""

    @property
    def deciding(self) -> str:
        """The set that early stopping, the best checkpoint and a plateau look at; empty: none."""
        return next((name for name in SETS if name in self.sets), "")

    @property
    def tests_at_end(self) -> bool:
        """Whether the test set is measured once."""
        return len(self.sets) == 2

    def measure(self, name: str, block: Block, step: int) -> dict[str, float]:
        """Loss and metrics on one of the sets, of weights after that step; all ranks call it.

        Raises DivergedError if the loss is not finite, or AgreedError if samples are not.
        """
        data, objective = self.sets[name]
        size = IMAGES if isinstance(data, Dataset) else data.batch_size or self.batch_size
        with block.as_tested():
            measured = measure_network(block, self.links, data, objective, size, self.watch)
        if not isfinite(measured["loss"]):
            check_weights(block, self.links, step)
            error = DivergedError(f"the {name} loss is not finite after step {step}")
            self._check_samples(name, data, block, size, error)
            raise error
        return measured

    def _check_samples(
        self, name: str, data: Data, block: Block, size: int, error: DivergedError
    ) -> None:
        """Raise AgreedError on all ranks if samples are not finite."""
        spoilt, batches = SpoiltSamples(), data.test_order().split(size)
        for ids in batches if block.first else ():
            spoilt.look("input", data.batch(ids, seed=0, epoch=0, augment=False), ids)
        self.links.all_gather(None)  # two threads of one stream would make it begin again and again
        for ids in batches if block.last else ():
            spoilt.look("target", data.targets(ids), ids)
        if (fault := self.links.first_of(spoilt.fault())) is not None:
            raise AgreedError(f"{error}: {fault.replace('of sample', f'of {name} sample')}")


def check_weights(block: Block, links: RankLinks, step: int) -> None:
    """Raise DivergedError on all ranks if weights of any are not finite.

    A loss is computed before its step, so the effect of the last step shows here first. Running
    statistics count; other buffers do not, because a causal mask is full of infinities.
    """
    norms = [m for m in block.module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    tensors = [*block.module.parameters(), *(b for norm in norms for b in norm.buffers())]
    finite = not tensors or bool(torch.stack([t.isfinite().all() for t in tensors]).all())
    if links.first_of(None if finite else True):
        raise DivergedError(f"the weights are not finite after step {step}")


def measure_network(
    block: Block,
    links: RankLinks,
    data: Data,
    objective: Objective,
    batch_size: int = IMAGES,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Mean loss and metrics of the whole chain of blocks over `data`, the same on every rank.

    `watch` is called with how many mini-batches of how many the host has gone through.
    """
    place, batches = links.place, data.test_order().split(batch_size)
    data.keep(2 * TOGETHER * batch_size * place.replicas)
    own = batches[place.replica :: place.replicas]
    scores, measured = Scores(links, objective, objective.accumulated), []
    for ids, out in _outputs(block, links, data, own, watch):
        targets = data.targets(ids).to(block.device)
        measured.append(objective.measured(out, targets))
        scores.add(objective.seen(out, targets))
    if block.last and len(own) < len(batches[:: place.replicas]):
        scores.add(None)  # as often as the first replica
    sums = torch.stack(measured).cpu() if measured else None
    everyone = links.gather((sums, scores.values()))
    means = {}
    if everyone is not None:
        lasts = [sums for sums, _ in everyone if sums is not None]
        # each replica has every R-th mini-batch: added up in their order, as one would
        in_order = [lasts[n % place.replicas][n // place.replicas] for n in range(len(batches))]
        totals = reduce(torch.add, in_order)
        found = (totals[:, 0] / totals[:, 1].clamp_min(1)).tolist()
        means = dict(zip(objective.sums, found, strict=True)) | everyone[links.size - 1][1]
    known = links.broadcast(means)
    return {name: known[name] for name in ("loss", *objective.metrics)}


def _outputs(
    block: Block,
    links: RankLinks,
    data: Data,
    batches: Sequence[Tensor],
    watch: Callable[[int, int], None],
) -> Iterator[tuple[Tensor, Any]]:
    """The samples' numbers and the network's outputs, batch by batch, on the last block.

    All ranks go through it; on the others it gives nothing.
    """
    if block.first or block.last:
        data.expect(list(batches), 0, 0)
    # two blocks on threads may share a module without parameters, so they change its mode together
    modes = [(module, module.training) for module in block.module.modules()]
    links.all_gather(None)
    block.module.eval()
    links.all_gather(None)
    try:
        with torch.no_grad():
            for number, ids in enumerate(batches):
                if block.first:
                    inputs = data.batch(ids, seed=0, epoch=0, augment=False).to(block.device)
                else:
                    inputs = links.from_previous()
                out = block.forward(inputs)
                if block.last:
                    yield ids, out
                else:
                    links.to_next(out)
                watch(number + 1, len(batches))
                if number % TOGETHER == TOGETHER - 1:
                    # the first block waits for the last one, or its outputs would pile up
                    links.all_gather(None)
        links.flush()
        links.all_gather(None)
    finally:
        for module, training in modes:
            module.training = training


def format_results(results: Mapping[str, float | None]) -> str:
    """The set's name, the accuracy in percent, other metrics by name; alone, the loss by name."""
    for on in SETS:
        tested = {
            name.removeprefix(f"{on}_"): value
            for name, value in results.items()
            if name.startswith(f"{on}_") and value is not None
        }
        if tested:
            shown = [
                f"{value:6.2%}" if name == "accuracy" else f"{name} {value:.4g}"
                for name, value in tested.items()
                if name != "loss" or len(tested) == 1
            ]
            return "  ".join([f"{on} {shown[0]}", *shown[1:]])
    return ""
