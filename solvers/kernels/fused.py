"""The host's side of source.cu: shapes, layouts and grids of its kernels, for any launcher."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("source.cu")
OPTIONS = ("--std=c++17",)
"""Compiler options of NVRTC."""
THREADS = 256
MAXIMUM_BLOCKS = 4096
MAXIMUM_RANK = 32
"""Largest rank of a factorization for which `multiply` uses one thread's registers."""
_WIDTH = 4
NAMES = {
    torch.float32: "float",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "signed char",
}
SETS = ("free", "box", "quantized", "sign")

Interval = tuple[str, float, float, float]
"""A set to project onto: its name in SETS, low end, high end and spacing."""


class Launcher(Protocol):
    """Runs the kernels of source.cu on one kind of device."""

    device_type: str

    def __call__(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """Start `kernel`, "name<types>", on so many blocks of threads.

        An argument is a tensor or None (a pointer), or a numpy scalar of the parameter's type.
        """


def couple(
    launch: Launcher,
    x: Tensor,
    lam: Tensor,
    kappa: Tensor | None,
    beta: float,
    factor: int,
    samples: float,
) -> tuple[Tensor, Tensor]:
    """(p_out, (loss, ||S lam - S x||^2, ||S x||^2))."""
    layout = _layout(x)
    x, lam = _laid(x, layout), _laid(lam, layout)
    kappa = None if kappa is None else _laid(kappa.to(lam.dtype), layout)
    p = torch.empty_like(x)
    types = [NAMES[x.dtype], NAMES[lam.dtype]]
    numbers = np.float32(beta), np.float32(samples)
    if factor == 1:
        items, width = _vectors(x, lam, kappa, p)
        name, shape = _name("couple", *types, width), (np.int64(items),)
    else:
        items, name = lam.numel(), _name("couple_pooled", *types)
        shape = _pixels(lam, factor, layout)
    partial = _partial(3, items, x)
    launch(name, partial.shape[1], x, lam, kappa, *shape, *numbers, p, partial)
    return p, _finished(launch, partial)


def step(
    launch: Launcher,
    lam: Tensor,
    x: Tensor,
    kappa: Tensor | None,
    p_in: Tensor,
    beta: float,
    eta: float,
    ascent: float,
    factor: int,
    flat: bool,
    constraint: Interval,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(lam', S lam', kappa', (||S lam' - x||^2, ||2 beta (lam' - lam)||^2))."""
    layout = _layout(lam)
    lam, x = _laid(lam, layout), _laid(x, layout)
    kappa = None if kappa is None else _laid(kappa.to(lam.dtype), layout)
    p_in = _laid(p_in, layout).float()
    new, new_kappa = torch.empty_like(lam), None if kappa is None else torch.empty_like(kappa)
    types = [NAMES[x.dtype], NAMES[lam.dtype]]
    kind, *ends = constraint
    set_ = np.int32(SETS.index(kind)), *(np.float32(end) for end in ends)
    numbers = np.float32(beta), np.float32(eta), np.float32(ascent), *set_
    if factor == 1:
        items, width = _vectors(lam, x, kappa, p_in, new, new_kappa)
        name, shape, shared = _name("step", *types, width), (np.int64(items),), [new]
    else:
        items, name = x.numel(), _name("step_pooled", *types)
        shape = *_pixels(x, factor, layout), np.int32(flat)
        shared = [new, torch.empty_like(x, dtype=lam.dtype)]
    partial = _partial(2, items, lam)
    given = lam, x, kappa, p_in, *shape, *numbers
    launch(name, partial.shape[1], *given, *shared, new_kappa, partial)
    return new, shared[-1], new_kappa, _finished(launch, partial)


def ascend(launch: Launcher, kappa: Tensor, lam: Tensor, x: Tensor, ascent: float) -> Tensor:
    """kappa + ascent (lam - x)."""
    layout = _layout(kappa)
    lam, x = _laid(lam.to(kappa.dtype), layout), _laid(x, layout)
    kappa = _laid(kappa, layout)
    out = torch.empty_like(kappa)
    vectors, width = _vectors(kappa, lam, x, out)
    name = _name("ascend", NAMES[x.dtype], NAMES[kappa.dtype], width)
    launch(name, _blocks(vectors), kappa, lam, x, np.int64(vectors), np.float32(ascent), out)
    return out


def pack(
    launch: Launcher, x: Tensor, dtype: torch.dtype, factor: int
) -> tuple[Tensor, Tensor | None]:
    """S x as `dtype`, and the scales of int8."""
    layout = _layout(x)
    x = _laid(x, layout)
    shape = (*x.shape[:2], *(side // factor for side in x.shape[2:]))
    out = torch.empty(shape, dtype=dtype, device=x.device, memory_format=layout)
    pixels = _pixels(out, factor, layout)
    if dtype is not torch.int8:
        name = _name("pack", NAMES[x.dtype], NAMES[dtype])
        launch(name, _blocks(out.numel()), x, *pixels, out)
        return out, None
    scales = torch.empty((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
    lanes = 32 if layout is torch.channels_last else 1
    groups = -(-x.shape[1] // lanes)
    last = *pixels[1:], np.int32(lanes), out, scales
    launch(_name("pack_int8", NAMES[x.dtype]), len(x) * groups, x, *last)
    return out, scales


def unpack(
    launch: Launcher, packed: Tensor, scales: Tensor | None, dtype: torch.dtype, factor: int
) -> Tensor:
    """S^+ y as `dtype`, where y is the result of `pack`."""
    layout = _layout(packed)
    packed = _laid(packed, layout)
    scales = None if scales is None else scales.to(dtype).contiguous()
    shape = (*packed.shape[:2], *(side * factor for side in packed.shape[2:]))
    out = torch.empty(shape, dtype=dtype, device=packed.device, memory_format=layout)
    pixels, name = (
        _pixels(packed, factor, layout),
        _name("unpack", NAMES[packed.dtype], NAMES[dtype]),
    )
    launch(name, _blocks(packed.numel()), packed, scales, *pixels, out)
    return out


def multiply(
    launch: Launcher, right: Tensor, gram: Tensor, start: Tensor, iterations: int, eps: float
) -> Tensor:
    """`iterations` updates M <- M * right / (M gram + eps) of the rows of `start`."""
    rows, rank = start.shape
    out = torch.empty_like(start, memory_format=torch.contiguous_format)
    maximum = next(m for m in (8, 16, MAXIMUM_RANK) if rank <= m)
    numbers = np.int64(rows), np.int32(rank), np.int32(iterations), np.float32(eps)
    tensors = right.contiguous(), gram.contiguous(), start.contiguous()
    launch(f"multiply<{maximum}>", _blocks(rows), *tensors, *numbers, out)
    return out


def _name(kernel: str, *parameters: object) -> str:
    return f"{kernel}<{', '.join(map(str, parameters))}>"


def _layout(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _laid(tensor: Any, layout: torch.memory_format) -> Any:
    return tensor if tensor is None else tensor.detach().contiguous(memory_format=layout)


def _pixels(pooled: Tensor, factor: int, layout: torch.memory_format) -> tuple[Any, ...]:
    """(size, channels, height, width, factor, last) of source.cu."""
    _, *sides = pooled.shape
    last = np.int32(layout is torch.channels_last)
    return np.int64(pooled.numel()), *map(np.int32, sides), np.int32(factor), last


def _vectors(*tensors: Tensor | None) -> tuple[int, int]:
    """The number of vectors, and of values in each: several if length and addresses allow it."""
    given = [tensor for tensor in tensors if tensor is not None]
    size = given[0].numel()
    aligned = all(t.data_ptr() % (_WIDTH * t.element_size()) == 0 for t in given)
    width = _WIDTH if aligned and size % _WIDTH == 0 else 1
    return size // width, width


def _blocks(items: int) -> int:
    return min(-(-items // THREADS), MAXIMUM_BLOCKS)


def _partial(sums: int, items: int, like: Tensor) -> Tensor:
    return torch.empty(sums, _blocks(items), dtype=torch.float32, device=like.device)


def _finished(launch: Launcher, partial: Tensor) -> Tensor:
    sums = torch.empty(len(partial), dtype=torch.float32, device=partial.device)
    launch("finish", len(partial), partial, np.int32(partial.shape[1]), sums)
    return sums
