"""Sums over replicas, in their order: the same bits on all of them, whatever carries them."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from hybrid.solvers.peers import Peers
from hybrid.solvers.state import Tensors

BUCKET_BYTES = 1 << 22
"""The size of a bucket; sums of buckets overlap. Over MPI and torch, smaller buckets take up to
twice the time, and larger ones gain little or lose (docs/benchmarks/appendix.md)."""
ROUNDED_BUCKET_BYTES = 1 << 20
"""The size of a bucket in a rounded format: checkpoints hold its rounding error."""
ALIGNMENT_BYTES = 64
"""Alignment of a vector's views, as torch aligns tensors: the bits of a product depend on it."""
MOST_IN_ORDER = 8
"""The most replicas for which "auto" sums in their order."""

MessageFormat = Literal["float32", "bfloat16", "int8"]
"""Number format of messages between replicas."""
Order = Literal["auto", "replicas", "engine"]
"""Order of the terms of a sum over replicas."""


class Reduction:
    r"""x <- sum_r x_r over R replicas, a vector of n numbers, in buckets.

        replica r  sends every replica s the s-th of R pieces of its bucket,
                   adds up the r-th pieces of all replicas, ((x_0 + x_1) + x_2) + ...,
                   sends that sum to every replica

    Each replica sends 2 (R-1)/R n numbers, as in a ring, in two hops; MPI_Allreduce promises no
    order. In a format of fewer bits both messages are rounded, each with error feedback
    (Karimireddy et al., arXiv 1901.09847). The owner of a sum uses the rounded sum, too, so all
    replicas have the same bits.

    With the engine's order, the links' all-reduce sums float32 buckets in an order that it chooses,
    with the same bits on all replicas.
    """

    def __init__(
        self, peers: Peers, kind: MessageFormat = "float32", order: Order = "replicas"
    ) -> None:
        self.peers, self.kind = peers, kind
        in_order = order == "replicas" or (order == "auto" and peers.replicas <= MOST_IN_ORDER)
        self.by_engine = kind == "float32" and not in_order
        """Whether the links' engine may choose the order."""
        self.residuals: Tensors = {}
        """The rounding error of each message, by name."""

    def start(self, vector: Tensor, name: str = "") -> Callable[[], Tensor]:
        """Begin the sum; calling the result waits for it.

        The rounding error of a vector is added to the next vector of the same name.
        """
        bucket_bytes = BUCKET_BYTES if self.kind == "float32" else ROUNDED_BUCKET_BYTES
        buckets = vector.split(max(1, bucket_bytes // vector.element_size()))
        if self.by_engine:
            sums = [self.peers.sum(bucket) for bucket in buckets]
            return lambda: torch.cat([each.finish() for each in sums])
        ends = [self._begin(f"{name}/{i}", bucket) for i, bucket in enumerate(buckets)]

        def finish() -> Tensor:
            sums = [end() for end in ends]
            return torch.cat([piece for end in sums for piece in end()])

        return finish

    def _begin(self, name: str, x: Tensor) -> Callable[[], Callable[[], list[Tensor]]]:
        peers, dtype = self.peers, x.dtype
        pieces = x.tensor_split(peers.replicas)
        messages = [self._message(f"up {name}.{r}", piece) for r, piece in enumerate(pieces)]
        receive = peers.exchange(messages, [messages[peers.replica]] * len(messages))

        def add() -> Callable[[], list[Tensor]]:
            total: Tensor = reduce(torch.add, (decode(m, self.kind, dtype) for m in receive()))
            message = self._message(f"down {name}", total)
            sums = peers.exchange([message] * len(messages), messages)
            return lambda: [decode(each, self.kind, dtype) for each in sums()]

        return add

    def _message(self, name: str, x: Tensor) -> Tensor:
        """Q(x + e), and e <- x + e - Q(x + e)."""
        if self.kind == "float32":
            return x
        x = x + self.residuals[name] if name in self.residuals else x
        message = encode(x, self.kind)
        self.residuals[name] = x - decode(message, self.kind, x.dtype)
        return message


def encode(x: Tensor, kind: MessageFormat) -> Tensor:
    """Encode a vector (n,) as a message; float32 leaves it unchanged.

    int8 is one vector of bytes: four of s = max |x| / 127, then round(x / s).
    """
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return x.to(torch.bfloat16)
    scale = (x.abs().max() / 127 if x.numel() else x.new_zeros(())).float()
    # if all numbers are 0, any scale will do
    rounded = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return torch.cat([scale.reshape(1).view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)])


def decode(message: Tensor, kind: MessageFormat, dtype: torch.dtype) -> Tensor:
    """Decode a message of `encode`, up to rounding."""
    if kind != "int8":
        return message.to(dtype)
    scale = message[:4].clone().view(torch.float32)
    return message[4:].view(torch.int8).to(dtype) * scale.to(dtype)


def feedback_copies(kind: MessageFormat, replicas: int) -> float:
    """Count the numbers that error feedback stores for each number of a vector."""
    return 0.0 if kind == "float32" else 1 + 1 / replicas


def use_counts(used: Sequence[bool], parameters: Sequence[Tensor]) -> Tensor:
    """Return 1 for each used parameter, else 0, on their device; no host copy if all are used."""
    device = parameters[0].device if parameters else None
    if all(used):
        return torch.ones(len(used), device=device)
    return torch.tensor([float(flag) for flag in used]).to(device)


def used_anywhere(used: Sequence[bool], counts: Tensor) -> Sequence[bool]:
    """Whether any replica has used each parameter, by this replica's flags and the summed counts.

    The counts are read, which synchronizes with the GPU, only if this replica left a parameter out.
    """
    return used if all(used) else [count > 0 for count in counts.tolist()]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors into one vector, each in the order of its memory, in at least float32.

    Zeros after a tensor align the next one as if it had its own memory.
    """
    parts = [memory(t) for t in tensors]
    if not parts:
        return torch.zeros(0)
    dtype = reduce(torch.promote_types, [part.dtype for part in parts], torch.float32)
    zeros = parts[0].new_zeros(ALIGNMENT_BYTES, dtype=dtype)
    pairs = ((part.to(dtype), zeros[: _gap(part, dtype)]) for part in parts)
    return torch.cat([x for pair in pairs for x in pair])


def _gap(part: Tensor, dtype: torch.dtype) -> int:
    """Count the numbers from a tensor's end to the next aligned position."""
    return -part.numel() % (ALIGNMENT_BYTES // dtype.itemsize)


def unpack(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a packed vector back into tensors of the same memory order."""
    for tensor, view in zip(tensors, views(vector, tensors), strict=True):
        tensor.data.copy_(view)


def views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View parts of a packed vector as tensors like others; only another dtype needs a copy."""
    numbers = [memory(tensor) for tensor in like]
    parts = vector.split([len(x) + _gap(x, vector.dtype) for x in numbers])
    return [_view(part[: len(x)], t) for part, x, t in zip(parts, numbers, like, strict=True)]


def _view(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    return part.to(like.dtype).as_strided(like.shape, like.stride())


def memory(tensor: Tensor) -> Tensor:
    """View a dense tensor's numbers in the order of its memory, (n,)."""
    # .data, not detach(): graphs under way saved running statistics, which they do not use
    tensor = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
    if not ordered.is_contiguous():
        raise ValueError(
            f"a tensor {tuple(tensor.shape)} of strides {tensor.stride()} is not dense: replicas "
            "cannot agree on it; make it contiguous"
        )
    return ordered.view(-1)
