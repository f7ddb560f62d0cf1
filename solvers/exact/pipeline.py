"""What a pipelined pass is made of: timetables, micro-batches, and messages between blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybrid.solvers.block import Block
from hybrid.solvers.kernels.operations import pack, unpack
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.windows import Batch


class Cost(NamedTuple):
    """Cost of one block's passes over one sample, in seconds or any other unit of time."""

    forward: float
    backward: float


class Kind(IntEnum):
    """What an operation does. At the same time steps come before forward passes."""

    BACKWARD = 0
    FORWARD = 1
    LOCAL = 2
    """Local work, in a tick in which the rank would wait."""


class Op(NamedTuple):
    """One entry of a timetable; sorted, entries are in the order in which they are taken."""

    time: int
    kind: Kind
    unit: int = 0
    """Which unit of the block, where a pass goes through it unit by unit."""
    item: int = 0
    """Which micro-batch."""

    def __str__(self) -> str:
        return f"{self.kind.name[0]}{self.item}"


def pass_order(index: int, count: int, micro_batches: int) -> list[Op]:
    """One block's timetable of a flushed pass.

    Forward and backward passes take turns, as soon as they can. With K = 3, m = 4:

        block 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        block 1      F0 F1 .  B0 F2 B1 F3 B2 .  B3
        block 2         F0 B0 F1 B1 F2 B2 F3 B3
    """
    m, warm_up = micro_batches, min(micro_batches, count - 1 - index)
    F, B = Kind.FORWARD, Kind.BACKWARD
    work = [(F, i) for i in range(warm_up)]
    for i in range(m - warm_up):
        work += [(F, warm_up + i), (B, i)]
    work += [(B, i) for i in range(m - warm_up, m)]
    return [Op(place, kind, item=item) for place, (kind, item) in enumerate(work)]


def drawn(orders: Sequence[Sequence[Op]]) -> str:
    """The timetables of all blocks of a chain as they are drawn above, each entry in one slot.

    A forward waits for that of the block before, a backward for that of the block behind and its
    own forward. Raises ValueError if no block can go on, with a drawing where a `?` marks what each
    block waits for.
    """
    ends: dict[tuple[Kind, int, int], int] = {}
    rows: list[dict[int, str]] = [{} for _ in orders]
    places, last = [0] * len(orders), len(orders) - 1
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = [*places]
        for k, order in enumerate(orders):
            for op in order[places[k] :]:
                needs = []
                if op.kind is Kind.FORWARD and k > 0:
                    needs = [(Kind.FORWARD, k - 1, op.item)]
                elif op.kind is Kind.BACKWARD:
                    needs = [(Kind.FORWARD, k, op.item), (Kind.BACKWARD, k + 1, op.item)]
                if not all(need in ends for need in needs if need[1] <= last):
                    break
                start = max([max(rows[k], default=-1) + 1, *(ends.get(need, 0) for need in needs)])
                rows[k][start], places[k] = str(op), places[k] + 1
                ends[op.kind, k, op.item] = start + 1
        if places == before:
            for k, order in enumerate(orders):
                rows[k] |= {max(rows[k], default=-1) + 1: f"{op}?" for op in order[places[k] :][:1]}
            raise ValueError("no block can go on:\n" + lines_of(rows))
    return lines_of(rows)


def lines_of(rows: Sequence[Mapping[int, str]]) -> str:
    """A line for each block: what it does in which slot, a dot where it is idle in between."""
    width = 1 + max(len(text) for row in rows for text in row.values())
    return "\n".join(
        f"block {k}   "
        + "".join(
            row.get(slot, "." if slot > min(row) else "").ljust(width)
            for slot in range(max(row, default=-1) + 1)
        ).rstrip()
        for k, row in enumerate(rows)
    )


class MicroBatch(NamedTuple):
    """A run of a mini-batch's samples, as one block sees it."""

    step: int
    """The step of its mini-batch."""
    number: int
    """Its place among the mini-batch's micro-batches."""
    start: int
    """Its first sample's place in the mini-batch."""
    stop: int
    """The place after its last sample."""
    size: int
    """Samples of the mini-batch on all replicas."""
    samples: int
    """Samples of the mini-batch on this replica."""
    images: Tensor | None = None
    """On the first block: (stop - start, C, H, W)."""
    labels: Tensor | None = None
    """On the last block: (stop - start,)."""
    weight: Tensor | None = None
    """There, if its loss weighs samples: see `Block.part_weight`."""
    learning_rate: float = 0.0
    """Of the step of its mini-batch."""

    @property
    def key(self) -> Key:
        """What its random numbers are drawn for."""
        return (0, self.step, self.number)

    @property
    def share(self) -> float:
        """Its weight in the mini-batch's mean."""
        return (self.stop - self.start) / self.size

    @property
    def own_share(self) -> float:
        """Its weight in the mean over this replica's samples."""
        return (self.stop - self.start) / self.samples

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its mini-batch."""
        return self.stop == self.samples


def split_into_micro_batches(batch: Batch, count: int, block: Block) -> list[MicroBatch]:
    """A mini-batch in `count` parts whose sizes differ by at most one; fewer if it is smaller."""
    sizes = [len(ids) for ids in batch.ids.tensor_split(min(count, len(batch)))]
    images = batch.images().split(sizes) if block.first else [None] * len(sizes)
    labels: Sequence[Tensor | None] = [None] * len(sizes)
    weights: Sequence[Tensor | None] = labels
    if block.last:
        targets = batch.labels()
        labels, weights = targets.split(sizes), block.part_weights(batch, targets, sizes)
    parts, start = [], 0
    for i, (n, x, y, w) in enumerate(zip(sizes, images, labels, weights, strict=True)):
        rows, of = (start, start + n), (batch.size, len(batch))
        parts.append(MicroBatch(batch.step, i, *rows, *of, x, y, w, batch.learning_rate))
        start += n
    return parts


WireFormat = Literal["float32", "bfloat16", "float16", "int8"]


class Wire:
    """Packs a tensor x for a cut and unpacks it on the other side.

    Sends S x (the mean over filter x filter pixels) in a number format; the receiver gets S^+ S x.
    That map is symmetric, so adjoints that are sent the same way are the exact adjoints of the
    network with S^+ S at its cuts. int8 sends round(x / s) with s = max |x| / 127 over each sample
    and channel (without pixels: over each sample), s in the format of x; rounding passes adjoints
    unchanged (straight through). float32 sends a tensor as it is, whatever its precision.
    """

    def __init__(self, number_format: WireFormat = "float32", filter: int = 1) -> None:
        self.format, self.filter = number_format, filter
        self.as_it_is = number_format == "float32" and filter == 1
        """Whether a message is the tensor itself."""

    @property
    def tensors(self) -> int:
        """Tensors in one message."""
        return 2 if self.format == "int8" else 1

    def send(self, put: Callable[[Tensor], None], x: Tensor) -> None:
        """Pass the tensors of x's message to `put`."""
        if self.as_it_is:
            put(x)
            return
        dtype = x.dtype if self.format == "float32" else getattr(torch, self.format)
        packed, scale = pack(x, dtype, self.filter)
        put(packed)
        if scale is not None:
            put(scale)

    def receive(self, get: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """x, of `dtype`, from the tensors that `get` gives."""
        if self.as_it_is:
            return get()
        packed = get()
        scale = get() if self.format == "int8" else None
        return unpack(
            packed, scale, packed.dtype if self.format == "float32" else dtype, self.filter
        )

    def send_adjoint(self, put: Callable[[Tensor], None], p: Tensor, size: int) -> None:
        """Send an adjoint of the mean over `size` samples; float16 needs it in per-sample scale."""
        self.send(put, p * size if self.format == "float16" else p)

    def receive_adjoint(self, get: Callable[[], Tensor], dtype: torch.dtype, size: int) -> Tensor:
        """The adjoint that `send_adjoint` was given."""
        p = self.receive(get, dtype)
        return p / size if self.format == "float16" else p

    def bytes_per_sample(self, shape: tuple[int, ...]) -> int:
        """Size of one sample's message at a cut of activations (C, H, W) in float32."""
        values = prod(shape) // self.filter**2
        if self.format == "int8":
            return values + 4 * (shape[0] if len(shape) > 1 else 1)
        return values * (4 if self.format == "float32" else 2)
