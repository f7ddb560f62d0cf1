"""The choice of an implementation: torch on any device, or the fused kernels on a GPU."""

from typing import Literal

import torch
from torch import Tensor

from hybrid.solvers.kernels.fused import Launcher

Kernels = Literal["auto", "torch", "cupy"]
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
"""Number formats of the fused kernels; others are computed by torch."""


_launcher: Launcher | None = None


def choose(kernels: Kernels, gpu: bool) -> str:
    """Choose the implementation from here on; gives it in words, with the reason.

    `auto` chooses the fused kernels on a GPU where CuPy is installed. Raises ValueError if "cupy"
    is asked for and cannot be used.
    """
    global _launcher
    _launcher = None
    if kernels == "torch" or (kernels == "auto" and not gpu):
        return "torch"
    try:
        if not gpu:
            raise RuntimeError("there is no GPU in use")
        from hybrid.solvers.kernels.cupy_launcher import CupyLauncher

        _launcher = CupyLauncher()
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
    kind, given = _launcher.device_type, [tensor for tensor in tensors if tensor is not None]
    fit = all(t.device.type == kind and t.dtype in FORMATS and t.numel() for t in given)
    return _launcher if fit else None
