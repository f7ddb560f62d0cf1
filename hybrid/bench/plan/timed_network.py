"""The network to plan for: its blocks, their inputs and their times."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hybrid.bench.contenders import CPU
from hybrid.bench.plan.device import Device
from hybrid.bench.plan.standin import stand_in
from hybrid.data import Data
from hybrid.errors import one_line
from hybrid.method.memory import laid_out
from hybrid.method.optimizers import placed
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.costs import measure_passes
from hybrid.networks.partition import Machines, Needed, split
from hybrid.networks.units import Chain
from hybrid.settings.config import Config
from hybrid.solvers.local_work.budget import Cost

Say = Callable[[str], None]


class TimedNetwork:
    """A network and its data, with times measured on this machine.

    A built-in network is timed and balanced by unit, each measured once. A user's network is cut as
    a training would cut it, and timed by block: between its units there may be several tensors,
    which only a cut packs.
    """

    def __init__(
        self,
        settings: Config,
        network: nn.Module,
        data: Data,
        tell: Say = lambda text: None,
        device: Device | None = None,
    ) -> None:
        """`device` is the device to time; None: this machine."""
        self.network, self._tell, self._device = network, tell, device
        self._sample = data.sample(SAMPLES)[0]
        self._size, self._wanted = settings.train.batch_size, settings.split
        self._by_units = isinstance(network, Chain)
        self._inputs: dict[tuple[object, ...], list[Tensor]] = {}
        whole = self._split(1)
        self.model = placed(whole.model, CPU)
        self.num_units = len(whole.units)
        """The number of units in one block; a cut into more blocks may give more."""
        self.times: dict[tuple[str, ...], dict[int, list[Cost]]] = {}
        """Unit names -> samples per pass -> each unit's seconds per sample."""

    def blocks(
        self, count: int, samples: int, cuts: Sequence[str] = (), needed: Needed | None = None
    ) -> Blocks:
        """Cut the network into `count` blocks or at `cuts`, with costs in passes over `samples`.

        Blocks have room on their machines if it is known what they need. ValueError if the network
        cannot be cut so.
        """
        if not self._by_units:
            cut = self._split(count, cuts)
            if needed is not None and cut.recut is not None:
                cut = cut.recut(lambda each: needed(each.with_bundles(self._sample)))
                cut = cut.with_bundles(self._sample)
            units = [run[0].merged(run) for run in map(cut.units_of, range(len(cut)))]
            blocks = Blocks(cut.model, units, list(range(len(units))), speeds=cut.speeds)
            return replace(blocks, costs=self.costs(blocks, samples))
        blocks = split(self.network, None if cuts else count, cuts=cuts or None, balance="even")
        speeds, memory = self.machines(len(blocks))
        blocks.costs, blocks.speeds = self.costs(blocks, samples), speeds
        if not cuts:
            machines = Machines(speeds or [1.0] * count, memory, needed)
            sums = [sum(cost) for cost in blocks.costs]
            blocks.starts = machines.starts(sums, lambda starts: replace(blocks, starts=starts))
        return blocks

    def machines(self, count: int, replicas: int = 1) -> list[tuple[float, ...]]:
        """Speeds and memory of the blocks' machines, of which an undivided network has the best.

        With replicas it is on each, and the worst decides.
        """
        numbers = [tuple(map(float, x)) for x in (self._wanted.speeds, self._wanted.memory)]
        one = max if replicas == 1 else min
        return [x if len(x) in (0, count) else (one(x),) for x in numbers]

    def _split(self, count: int, cuts: Sequence[str] = ()) -> Blocks:
        sample = None if self._by_units else self._sample
        speeds, memory = self.machines(count)
        cut_here = partial(split, self.network, sample=sample)
        balance = self._wanted.balance
        if cuts:
            cut = cut_here(cuts=cuts)
        else:
            cut = cut_here(count, balance=balance, speeds=speeds, memory=memory)
        cut.speeds = speeds
        return cut.with_bundles(self._sample)

    def measure(self, blocks: Blocks, *sizes: int) -> None:
        """Time every unit's passes over each number of samples not yet measured.

        They take turns with passes over a whole mini-batch, the reference, so that the ratio holds
        even if the machine's speed has changed since.
        """
        table = self._table(blocks)
        new = [n for n in dict.fromkeys((self._size, *sizes)) if n not in table]
        if not new:
            return
        sizes_text = ", ".join(map(str, new))
        self._tell(f"timing passes over {sizes_text} samples")
        turns = list(dict.fromkeys((self._size, *new)))
        passes = measure_passes if self._device is None else self._device.passes
        try:
            rows = [self._rows(blocks, n) for n in turns]
            whole, *others = passes(blocks.model, blocks.units, rows)
        except (ValueError, RuntimeError) as error:  # of a user's module
            raise ValueError(
                f"a pass over {sizes_text} samples fails, which says: "
                f"{one_line(error)[:200]}; take fewer --micro-batches or --replicas, or a "
                "larger --batch-size"
            ) from error
        base = table.setdefault(self._size, whole)
        scale = sum(map(sum, base)) / sum(map(sum, whole))
        for n, costs in zip(turns[1:], others, strict=True):
            table[n] = [Cost(scale * c.forward, scale * c.backward) for c in costs]

    def costs(self, blocks: Blocks, samples: int) -> list[Cost]:
        """Return each unit's seconds per sample, in passes over `samples`."""
        self.measure(blocks, samples)
        return self._table(blocks)[samples]

    def stand_in(self, blocks: Blocks) -> Blocks:
        """Replace the units by stand-ins with their measured times."""
        return stand_in(blocks, self._table(blocks), self._rows(blocks, 2))

    def inputs(self, blocks: Blocks) -> list[Tensor]:
        """Compute the inputs of every block, for two samples."""
        key = blocks_key(blocks)
        if key not in self._inputs:
            inputs = self._inputs[key] = [self._rows(blocks, 2)]
            with blocks.mode(training=False), torch.no_grad():
                for k in range(len(blocks) - 1):
                    inputs.append(blocks.module(k)(inputs[-1]))
        return self._inputs[key]

    def _table(self, blocks: Blocks) -> dict[int, list[Cost]]:
        return self.times.setdefault(tuple(unit.name for unit in blocks.units), {})

    def _rows(self, blocks: Blocks, count: int) -> Tensor:
        """Pack `count` samples for the first block."""
        rows = tree_map(lambda x: x[torch.arange(count) % len(x)], self._sample)
        return laid_out(blocks.pack_inputs(rows))


def blocks_key(blocks: Blocks) -> tuple[object, ...]:
    """Return a key that is equal for equal blocks of one network."""
    return (*(unit.name for unit in blocks.units), *blocks.starts, blocks.speeds)
