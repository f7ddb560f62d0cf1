"""Sums over replicas, in their order: the same bits on all of them, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from hybrid.solvers.peers import Peers
from hybrid.solvers.state import Tensors

BUCKET_BYTES = 1 << 22
"""Of a bucket: its sum travels while the next one is on its way. On MPI's links and on torch's less
takes up to twice the time, and more saves little or costs (docs/benchmarks/appendix.md)."""
ROUNDED_BUCKET_BYTES = 1 << 20
"""Of a bucket in fewer bits: checkpoints hold what rounding leaves out by bucket."""
ALIGNMENT_BYTES = 64
"""Of the views of a vector, as of tensors of their own: the bits of a product depend on it."""
FEW_REPLICAS = 8
"""Up to which sums are in the order of the replicas, unless another is asked for."""

MessageFormat = Literal["float32", "bfloat16", "int8"]
"""Of numbers on their way between replicas."""
Order = Literal["auto", "replicas", "engine"]
"""Of the terms of a sum over replicas; auto: of the replicas where they are few."""


class Reduction:
    r"""x <- sum_r x_r over R replicas, a vector of n numbers, in buckets.

        replica r  sends every replica s the s-th of R pieces of its bucket,
                   adds up the r-th pieces of all replicas, ((x_0 + x_1) + x_2) + ...,
                   sends that sum to every replica

    Each sends 2 (R-1)/R of n numbers, as a ring does, in two hops; MPI_Allreduce promises no order.
    In a format of fewer bits both messages are rounded, each with its error feedback, and the owner
    of a sum takes what the others get: all replicas have the same bits.

    Where the order may be the engine's, the links' own all-reduce sums the buckets of numbers that
    travel as they are: in an order that it chooses, but with the same bits on all replicas.
    """

    def __init__(
        self, peers: Peers, kind: MessageFormat = "float32", order: Order = "replicas"
    ) -> None:
        self.peers, self.kind = peers, kind
        few = peers.replicas <= FEW_REPLICAS
        self.by_engine = kind == "float32" and (order == "engine" or (order == "auto" and not few))
        """Whether the links' engine may choose the order."""
        self._up: dict[tuple[int, int], Feedback] = {}
        self._down: dict[int, Feedback] = {}

    def start(self, vector: Tensor) -> Callable[[], Tensor]:
        """Begin; the call of what it gives waits for the sum."""
        bucket_bytes = BUCKET_BYTES if self.kind == "float32" else ROUNDED_BUCKET_BYTES
        buckets = vector.split(max(1, bucket_bytes // vector.element_size()))
        if self.by_engine:
            sums = [self.peers.sum(bucket) for bucket in buckets]
            engine = [end for end in sums if end is not None]
            if len(engine) == len(buckets):
                return lambda: _joined(vector, buckets, [end() for end in engine])
        ends = [self._begin(i, bucket) for i, bucket in enumerate(buckets)]

        def finish() -> Tensor:
            sums = [end() for end in ends]
            return torch.cat([piece for end in sums for piece in end()])

        return finish

    def _begin(self, bucket: int, x: Tensor) -> Callable[[], Callable[[], list[Tensor]]]:
        peers, dtype = self.peers, x.dtype
        pieces = x.tensor_split(peers.replicas)
        messages = [self._sent(bucket, r, piece) for r, piece in enumerate(pieces)]
        arrived = peers.exchange(messages, [messages[peers.replica]] * len(messages))

        def add() -> Callable[[], list[Tensor]]:
            theirs = [decode(message, self.kind, dtype) for message in arrived()]
            total: Tensor = reduce(torch.add, theirs)
            message = self._down.setdefault(bucket, Feedback(self.kind)).send(total)
            sums = peers.exchange([message] * len(messages), messages)
            return lambda: [decode(each, self.kind, dtype) for each in sums()]

        return add

    def _sent(self, bucket: int, replica: int, piece: Tensor) -> Tensor:
        return self._up.setdefault((bucket, replica), Feedback(self.kind)).send(piece)

    def state(self) -> Tensors:
        """What rounding has left out."""
        up = {f"up {b}.{r}": f.left for (b, r), f in self._up.items()}
        down = {f"down {b}": f.left for b, f in self._down.items()}
        return {name: left for name, left in (up | down).items() if left is not None}

    def load_state(self, saved: Tensors) -> None:
        """Take back what `state` gave."""
        for name, left in saved.items():
            way, _, where = name.partition(" ")
            feedback = Feedback(self.kind)
            feedback.left = left
            if way == "up":
                bucket, _, replica = where.partition(".")
                self._up[int(bucket), int(replica)] = feedback
            else:
                self._down[int(where)] = feedback


def encode(x: Tensor, kind: MessageFormat) -> Tensor:
    """A vector (n,) as it travels; float32 sends it as it is.

    int8 is round(x / s) behind the four bytes of s = max |x| / 127, in one vector of bytes.
    """
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return x.to(torch.bfloat16)
    scale = (x.abs().max() / 127 if x.numel() else x.new_zeros(())).float()
    # of zeros alone every scale will do
    rounded = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return torch.cat([scale.reshape(1).view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)])


def decode(message: Tensor, kind: MessageFormat, dtype: torch.dtype) -> Tensor:
    """What `encode` was given, as far as the format holds it."""
    if kind != "int8":
        return message.to(dtype)
    scale = message[:4].clone().view(torch.float32)
    return message[4:].view(torch.int8).to(dtype) * scale.to(dtype)


class Feedback:
    """What rounding has left out of a vector, added to the next one (error feedback).

        message = Q(x + e),   e <- x + e - Q(x + e)

    (Karimireddy et al., arXiv 1901.09847.) Nothing is kept where the format is exact.
    """

    def __init__(self, kind: MessageFormat) -> None:
        self.kind = kind
        self.left: Tensor | None = None

    def send(self, x: Tensor) -> Tensor:
        """x as it travels."""
        if self.kind == "float32":
            return x
        x = x if self.left is None else x + self.left
        message = encode(x, self.kind)
        self.left = x - decode(message, self.kind, x.dtype)
        return message


def _joined(vector: Tensor, buckets: Sequence[Tensor], sums: list[Tensor]) -> Tensor:
    """The sums of a vector's buckets as one vector, which it may have become itself."""
    if len(sums) == 1:
        return sums[0]
    if all(map(Tensor.is_set_to, sums, buckets)):
        return vector
    return torch.cat(sums)


def left_over(kind: MessageFormat, replicas: int) -> float:
    """Numbers a rank keeps for each one of a vector: what rounding has left out, up and down."""
    return 0.0 if kind == "float32" else 1 + 1 / replicas


def counted_on_device(used: Sequence[bool], parameters: Sequence[Tensor]) -> Tensor:
    """1 for each parameter that is used, else 0, on their device; no copy if all are used."""
    device = parameters[0].device if parameters else None
    if all(used):
        return torch.ones(len(used), device=device)
    return torch.tensor([float(flag) for flag in used]).to(device)


def used_anywhere(used: Sequence[bool], counts: Tensor) -> Sequence[bool]:
    """Whether some replica has used each parameter, from own use and the sum of all counts.

    What this replica has used is used: the counts are read, which stops the host until a GPU has
    them, only if it has left a parameter out.
    """
    return used if all(used) else [count > 0 for count in counts.tolist()]


def packed(tensors: Sequence[Tensor], aligned: bool = False) -> Tensor:
    """One vector of all numbers, each tensor in the order of its memory, at least in float32.

    If `aligned`, zeros behind a tensor let the next one begin as memory of its own would.
    """
    dtype, parts = torch.float32, [memory(t) for t in tensors]
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    if not parts:
        return torch.zeros(0)
    zeros = parts[0].new_zeros(ALIGNMENT_BYTES, dtype=dtype)
    gaps = [zeros[: _gap(part.numel(), dtype)] if aligned else zeros[:0] for part in parts]
    pairs = zip(parts, gaps, strict=True)
    return torch.cat([x for part, gap in pairs for x in (part.to(dtype), gap)])


def _gap(numbers: int, dtype: torch.dtype) -> int:
    """Numbers from a tensor's end to where an aligned one may begin."""
    return -numbers % (ALIGNMENT_BYTES // dtype.itemsize)


def unpack(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the numbers of a packed vector back into tensors of the same memory order."""
    places = [memory(t) for t in tensors]
    for part, place in zip(vector.split([p.numel() for p in places]), places, strict=True):
        place.copy_(part)


def views(vector: Tensor, like: Sequence[Tensor], aligned: bool = False) -> list[Tensor]:
    """Tensors of the formats of others, in the memory of their packed vector where it fits."""
    sizes = [memory(tensor).numel() for tensor in like]
    whole = [n + _gap(n, vector.dtype) * aligned for n in sizes]
    parts = [part[:n] for part, n in zip(vector.split(whole), sizes, strict=True)]
    return [_view(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def _view(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        part = part.clone() if part.storage_offset() % 2 else part
        part = torch.view_as_complex(part.view(-1, 2))
    return part.to(like.dtype).as_strided(like.shape, like.stride())


def memory(tensor: Tensor) -> Tensor:
    """A dense tensor's numbers in the order of its memory, (n,), without a copy."""
    # not detach(): what graphs under way have noted of running statistics they do not use
    tensor = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    ordered = tensor.permute(dims)
    if not ordered.is_contiguous():
        raise ValueError(
            f"a tensor {tuple(tensor.shape)} of strides {tensor.stride()} is not dense: replicas "
            "cannot agree on it; make it contiguous"
        )
    return ordered.view(-1)
