"""The source of the fused kernels, run on the CPU: compiled as C++, thread by thread."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from solvers.kernels.fused import SOURCE, THREADS

_FLOATS = ("float", "float16", "bfloat16")
_PAIRS = [f"{x}, {t}" for x, t in product(_FLOATS, _FLOATS)]
NAMES = [
    "finish",
    *(f"{k}<{p}, {v}>" for k, p, v in product(("couple", "step", "ascend"), _PAIRS, (1, 4))),
    *(f"{k}<{p}>" for k, p in product(("couple_pooled", "step_pooled", "pack"), _PAIRS)),
    *(f"pack_int8<{x}>" for x in _FLOATS),
    *(f"unpack<{y}, {x}>" for y, x in product((*_FLOATS, "signed char"), _FLOATS)),
    *(f"multiply<{rank}>" for rank in (8, 16, 32)),
]
"""Every kernel that the host may ask for."""
_SCALARS = {np.float32: ctypes.c_float, np.int32: ctypes.c_int32, np.int64: ctypes.c_int64}


class CpuLauncher:
    """Runs a kernel on CPU tensors."""

    device_type = "cpu"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.started: list[str] = []
        self._alone = Lock()

    def __call__(self, kernel: str, blocks: int, *arguments: Any) -> None:
        self.started.append(kernel)
        values = [_value(argument) for argument in arguments]
        addresses = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
        run = getattr(self._library, f"run_{NAMES.index(kernel)}")
        with self._alone:
            run(blocks, THREADS, (ctypes.c_void_p * len(values))(*addresses))


def build(folder: Path) -> Path:
    """Compile all kernels into a library."""
    entries = [
        f'extern "C" void run_{i}(unsigned blocks, unsigned threads, void** arguments) '
        f"{{ emulated::launch(&{name}, blocks, threads, arguments); }}"
        for i, name in enumerate(NAMES)
    ]
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(
        "\n".join(['#include "cuda_on_cpu.h"', SOURCE.read_text(), *entries]), encoding="utf-8"
    )
    flags = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")
    here = Path(__file__).parent
    command = ["g++", *flags, f"-I{here}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)
    return library


def instantiated() -> str:
    """The source with every kernel in use, for a CUDA compiler."""
    uses = "\n".join(f"    (void*)&{name}," for name in NAMES)
    return f"{SOURCE.read_text()}\nvoid* kernels[] = {{\n{uses}\n}};\n"


def _value(argument: Any) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return _SCALARS[type(argument)](argument.item())
