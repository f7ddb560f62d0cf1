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
from hybrid.method.optimizers import placed
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.costs import measure_passes
from hybrid.networks.partition.balance import Needed
from hybrid.networks.partition.divisible import Divisible
from hybrid.networks.partition.split import split
from hybrid.networks.units import merged
from hybrid.settings.config import Config
from hybrid.solvers.local_work.budget import Cost

Say = Callable[[str], None]


class TimedNetwork:
    """A network and its data, with times measured on this machine.

    It is cut as a training would cut it, and timed by block: what crosses no cut costs nothing.
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
        self._inputs: dict[tuple[object, ...], list[Tensor]] = {}
        whole = self._split(1)
        self.model = placed(whole.model, CPU)
        units = Divisible(network, self._sample)
        self.num_units = len(units.whole if self._wanted.inside is False else units.opened)
        """Into how many blocks the network can be cut, at most."""
        self.times: dict[tuple[str, ...], dict[int, list[Cost]]] = {}
        """Unit names -> samples per pass -> each unit's seconds per sample."""

    def blocks(
        self,
        count: int,
        samples: int,
        cuts: Sequence[str] = (),
        needed: Needed | None = None,
        inside: bool = True,
    ) -> Blocks:
        """Cut the network into `count` blocks or at `cuts`, with costs in passes over `samples`.

        With `inside`, cuts may lie inside units unless the settings forbid that. Blocks have room
        on their machines if it is known what they need. ValueError if the network cannot be cut so.
        """
        cut = self._split(count, cuts, inside)
        if needed is not None and cut.recut is not None:
            cut = cut.recut(lambda each: needed(each.with_bundles(self._sample)))
            cut = cut.with_bundles(self._sample)
        units = [merged(cut.units_of(k), local=True) for k in range(len(cut))]
        blocks = Blocks(cut.model, units, list(range(len(units))), speeds=cut.speeds)
        return replace(blocks, costs=self.costs(blocks, samples))

    def machines(self, count: int, replicas: int = 1) -> list[tuple[float, ...]]:
        """Speeds and memory of the blocks' machines, of which an undivided network has the best.

        With replicas it is on each, and the worst decides.
        """
        numbers = [tuple(map(float, x)) for x in (self._wanted.speeds, self._wanted.memory)]
        one = max if replicas == 1 else min
        return [x if len(x) in (0, count) else (one(x),) for x in numbers]

    def _split(self, count: int, cuts: Sequence[str] = (), inside: bool = True) -> Blocks:
        speeds, memory = self.machines(count)
        cut_here = partial(split, self.network, sample=self._sample)
        if cuts:
            cut = cut_here(cuts=cuts)
        else:
            wanted = self._wanted.inside
            may = (None if inside else False) if wanted is None else wanted
            balance = self._wanted.balance
            cut = cut_here(count, balance=balance, speeds=speeds, memory=memory, inside=may)
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
        return blocks.pack_inputs(rows)


def blocks_key(blocks: Blocks) -> tuple[object, ...]:
    """Return a key that is equal for equal blocks of one network."""
    return (*(unit.name for unit in blocks.units), *blocks.starts, blocks.speeds)
