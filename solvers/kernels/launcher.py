"""The fused kernels of source.cu: what runs them, the one call that starts them, their choice."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("source.cu")
OPTIONS = ("--std=c++17",)
"""Compiler options of NVRTC."""
THREADS = 256
MAXIMUM_BLOCKS = 4096
WIDTH = 4
"""Values that a thread loads at once, if length and addresses allow it."""
TYPES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Number formats of the kernels; others are computed by torch."""


class Launcher(Protocol):
    """Runs the kernels of source.cu on one kind of device."""

    device_type: str

    def __call__(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """Start `kernel`, "name<types>", on this number of blocks of threads.

        An argument is a tensor or None (a pointer), or a numpy scalar of the parameter's type.
        """


class CupyLauncher:
    """Compiles with NVRTC at the first use and runs on torch's current stream, in torch's memory.

    Raises CuPy's errors if there is no usable driver or compiler.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        partial = torch.ones(1, 2, device="cuda")
        out = torch.empty(1, device="cuda")
        self("finish", 1, partial, np.int32(2), out)
        if float(out) != 2:
            raise RuntimeError("a kernel gave a wrong sum")

    def __call__(self, kernel: str, blocks: int, *arguments: Any) -> None:
        from cupy.cuda import Device, Stream

        device = next(a.device.index for a in arguments if isinstance(a, Tensor))
        values = [np.uint64(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        values = [np.uint64(0) if value is None else value for value in values]
        with Device(device), Stream.from_external(torch.cuda.current_stream(device)):
            _compiled(kernel, device)((blocks,), (THREADS,), tuple(values))


@cache
def _compiled(kernel: str, device: int) -> Any:
    from cupy import RawModule

    module = RawModule(code=SOURCE.read_text(), options=OPTIONS, name_expressions=[kernel])
    return module.get_function(kernel)


_launcher: Launcher | None = None


def choose(kernels: Literal["auto", "torch", "cupy"], gpu: bool) -> str:
    """Choose the implementation from here on; gives it in words, with the reason.

    `auto` chooses the fused kernels on a GPU where CuPy is installed. Raises ValueError if "cupy"
    is asked for and cannot be used.
    """
    set_launcher(None)
    if kernels == "torch" or (kernels == "auto" and not gpu):
        return "torch"
    try:
        if not gpu:
            raise RuntimeError("there is no GPU in use")
        set_launcher(CupyLauncher())
        return "cupy"
    except Exception as error:  # of the driver, the compiler or the import
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    if kernels == "cupy":
        raise ValueError(
            f"kernels is 'cupy' but they cannot be used ({problem}): pip "
            "install 'cupy-cuda13x[ctk]' (for CUDA 12: cupy-cuda12x) where there is a GPU, or take "
            "auto or torch"
        )
    return f"torch ({problem})"


def set_launcher(launcher: Launcher | None) -> Launcher | None:
    """Let this launcher run the kernels; gives the previous one."""
    global _launcher
    before, _launcher = _launcher, launcher
    return before


def launcher(*tensors: Tensor | None) -> Launcher | None:
    """The launcher of fused kernels for these tensors; None: torch computes."""
    if _launcher is None:
        return None
    kind, present = _launcher.device_type, [t for t in tensors if t is not None]
    fit = all(t.device.type == kind and t.dtype in TYPES and t.numel() for t in present)
    return _launcher if fit else None


def elementwise(
    launch: Launcher,
    kernel: str,
    inputs: Sequence[Tensor | None],
    numbers: Sequence[float | np.int32],
    types: Sequence[Tensor],
    outputs: Sequence[int],
    sums: int = 0,
) -> tuple[list[Any], Tensor]:
    """Run a kernel over tensors of one shape; gives its outputs and its sums over all values.

    `types` are tensors of its template's types, and `outputs` the inputs whose formats its outputs
    have. It takes (inputs, number of vectors, numbers, outputs, partial sums).
    """
    first = inputs[0]
    assert first is not None
    last = first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    read = [t if t is None else t.detach().contiguous(memory_format=layout) for t in inputs]
    written = [x if (x := read[i]) is None else torch.empty_like(x) for i in outputs]
    present = [t for t in (*read, *written) if t is not None]
    aligned = all(t.data_ptr() % (WIDTH * t.element_size()) == 0 for t in present)
    width = WIDTH if aligned and first.numel() % WIDTH == 0 else 1
    vectors = first.numel() // width
    blocks = num_blocks(vectors)
    partial = torch.empty(sums, blocks, device=first.device)
    scalars = [n if isinstance(n, np.int32) else np.float32(n) for n in numbers]
    name = f"{kernel}<{', '.join(TYPES[t.dtype] for t in types)}, {width}>"
    more = [partial] if sums else []
    launch(name, blocks, *read, np.int64(vectors), *scalars, *written, *more)
    totals = torch.empty(sums, device=first.device)
    if sums:
        launch("finish", sums, partial, np.int32(blocks), totals)
    return written, totals


def num_blocks(items: int) -> int:
    """Blocks of threads for this number of items, which depends on it alone."""
    return min(-(-items // THREADS), MAXIMUM_BLOCKS)
