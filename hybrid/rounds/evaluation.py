"""Measuring a network: on a validation set while it is trained, and on a test set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybrid.data import Data, Dataset
from hybrid.errors import AgreedError
from hybrid.links import RankLinks
from hybrid.networks.units import kept_modes
from hybrid.rounds.epoch_windows import EpochSource
from hybrid.rounds.phase_report import DivergedError
from hybrid.solvers.block import Block
from hybrid.solvers.metrics import compute, reset
from hybrid.solvers.objective import Objective
from hybrid.solvers.windows import Batch

MOST_UNDER_WAY = 4
"""Mini-batches of an evaluation after which the first block waits for the last one."""
SETS = ("validation", "test")
"""The sets on which a network is measured; the first that exists decides."""
IMAGES = 500
"""Samples of a mini-batch of an evaluation on images of this package."""


@dataclass(frozen=True)
class Evaluation:
    """The validation and the test set of a run, each with its objective.

    If there is a validation set, it decides which weights are best, and the test set is measured
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
        """Loss and metrics on one of the sets after a step; all ranks call it.

        Raises DivergedError if the loss is not finite, or AgreedError if samples are not.
        """
        data, objective = self.sets[name]
        size = IMAGES if isinstance(data, Dataset) else data.batch_size or self.batch_size
        with block.as_tested():
            measured = measure_network(block, self.links, data, objective, size, self.watch)
        if not isfinite(measured["loss"]):
            check_weights(block, self.links, step)
            error = DivergedError(f"the {name} loss is not finite after step {step}")
            source = EpochSource(data, 0, 0, augment=False, device=block.device)
            batches = [Batch(ids, 0.0, source) for ids in data.test_order().split(size)]
            check_samples(block, self.links, batches, len(data), f"{name} sample", error)
            raise error
        return measured


def check_samples(
    block: Block,
    links: RankLinks,
    batches: Sequence[Batch],
    count: int,
    kind: str,
    error: DivergedError,
) -> None:
    """Raise AgreedError on all ranks if one of `count` samples is not finite."""
    fault = None
    if block.first:
        fault = _describe_spoilt(f"input of {kind}", count, ((b.ids, b.images()) for b in batches))
    links.all_gather(None)  # two threads of one stream would make it begin again and again
    if block.last and fault is None:
        fault = _describe_spoilt(f"target of {kind}", count, ((b.ids, b.labels()) for b in batches))
    if (fault := links.first_of(fault)) is not None:
        raise AgreedError(f"{error}: {fault}")


def _describe_spoilt(what: str, count: int, batches: Iterable[tuple[Tensor, Tensor]]) -> str | None:
    """The first sample with nan or inf, with the remedy.

    None if none has any, or over half of them: masks and missing targets are not finite on purpose.
    A nan in an input never is.
    """
    first, spoilt, samples, certain = "", 0, 0, False
    for ids, x in batches:
        rows = (~x.isfinite()).reshape(len(x), -1).any(1).nonzero().flatten().cpu()
        if len(rows) and not first:
            nan = x[rows[0]].isnan().any()
            first = f"{int(ids[rows[0]]) % count} has {'nan' if nan else 'inf'}"
        spoilt, samples = spoilt + len(rows), samples + len(x)
        certain = certain or (what.startswith("input") and bool(x.isnan().any()))
    if not first or (2 * spoilt > samples and not certain):
        return None
    return (
        f"the {what} {first} in it: correct it, or leave it out; if the network or its loss takes "
        "that, lower the learning rate"
    )


def check_weights(block: Block, links: RankLinks, step: int) -> None:
    """Raise DivergedError on all ranks if weights of any are not finite.

    A loss is computed before its step, so the effect of the last step shows here first. Running
    statistics count; other buffers do not, because a causal mask is full of infinities.
    """
    norms = [m for m in block.module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    trained = (p for p in block.module.parameters() if p.requires_grad)
    tensors = [*trained, *(b for norm in norms for b in norm.buffers())]
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
    objective = objective.on(block.device) if block.last else objective
    data.keep(2 * MOST_UNDER_WAY * batch_size * place.replicas)
    share = batches[place.replica :: place.replicas]
    accumulated, measured = _Accumulated(links, objective), []
    for ids, out in _outputs(block, links, data, share, watch):
        targets = data.targets(ids).to(block.device)
        measured.append(objective.measured(out, targets))
        accumulated.add([*tree_leaves(out), targets])
    if block.last and len(share) < len(batches[:: place.replicas]):
        accumulated.add(None)  # as often as the first replica
    sums = torch.stack(measured).cpu() if measured else None
    everyone = links.gather((sums, accumulated.values()))
    means = {}
    if everyone is not None:
        lasts = [sums for sums, _ in everyone if sums is not None]
        # each replica has every R-th mini-batch: added up in their order, as one would
        in_order = [lasts[n % place.replicas][n // place.replicas] for n in range(len(batches))]
        totals = reduce(torch.add, in_order)
        quotients = (totals[:, 0] / totals[:, 1].clamp_min(1)).tolist()
        means = dict(zip(objective.sums, quotients, strict=True)) | everyone[links.size - 1][1]
    means = links.broadcast(means)
    return {name: means[name] for name in ("loss", *objective.metrics)}


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
    with kept_modes(block.module), torch.no_grad():
        # two blocks on threads may share a module without parameters: they change its mode together
        links.all_gather(None)
        block.module.eval()
        links.all_gather(None)
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
            if number % MOST_UNDER_WAY == MOST_UNDER_WAY - 1:
                # the first block waits for the last one, or its outputs would pile up
                links.all_gather(None)
        links.flush()
        links.all_gather(None)


class _Accumulated:
    """Metrics that accumulate over an evaluation, on the last blocks of all replicas.

    Outputs and targets go to the first replica, which alone computes.
    """

    def __init__(self, links: RankLinks, objective: Objective) -> None:
        self._links, self._objective = links, objective
        self._computes = links.place.number == links.size - 1
        self._reset()

    def add(self, tensors: Sequence[Tensor] | None) -> None:
        """Take in a batch of every replica, in their order; None: this one has none.

        They are the tensors of an output, and the targets. All replicas call it as often.
        """
        if not self._objective.accumulated:
            return
        replicas, nothing = range(self._links.place.replicas), torch.empty(0)
        if len(replicas) == 1:
            batches = [] if tensors is None else [tensors]
        else:
            leaves = self._objective.output.num_leaves + 1
            exchanges = [
                self._links.peers.exchange([x if r == 0 else nothing for r in replicas])
                for x in tensors or [nothing] * leaves
            ]
            columns = [exchange() for exchange in exchanges]
            batches = [b for b in zip(*columns, strict=True) if len(b[-1])]
        if self._computes:
            self._objective.accumulate(batches)

    def values(self) -> dict[str, float]:
        """The values of the metrics, on the rank that computes; elsewhere nothing."""
        metrics = self._objective.accumulated if self._computes else {}
        values = {name: compute(name, metric) for name, metric in metrics.items()}
        self._reset()  # what they hold is no longer wanted
        return values

    def _reset(self) -> None:
        for name, metric in self._objective.accumulated.items() if self._computes else ():
            reset(name, metric)


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
