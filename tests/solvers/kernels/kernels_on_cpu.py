"""The source of the fused kernels, run on the CPU: compiled as C++, thread by thread."""

import ctypes
import os
import subprocess
import tempfile
from hashlib import sha256
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from hybrid.solvers.kernels.launcher import SOURCE, THREADS

_FLOATS = ("float", "float16", "bfloat16")
_PAIRS = [f"{x}, {t}" for x, t in product(_FLOATS, _FLOATS)]
NAMES = [
    "finish",
    *(f"{k}<{p}, {v}>" for k, p, v in product(("couple", "step", "limit"), _PAIRS, (1, 4))),
]
"""Every kernel that the host may ask for."""
SOME = [name for name in NAMES if not any(f"<{pair}" in name for pair in _PAIRS[1:-1])]
"""Each kernel for a few of its formats."""
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


def build() -> Path:
    """All kernels as a library."""
    entries = [
        f'extern "C" void run_{i}(unsigned blocks, unsigned threads, void** arguments) '
        f"{{ emulated::launch(&{name}, blocks, threads, arguments); }}"
        for i, name in enumerate(NAMES)
    ]
    header = (Path(__file__).parent / "cuda_on_cpu.h").read_text()
    flags = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")
    return compiled("\n".join([header, SOURCE.read_text(), *entries]), "g++", *flags, "-x", "c++")


def compiled(source: str, compiler: str, *flags: str) -> Path:
    """What the compiler makes of the source: once for this source, compiler and these flags."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = sha256("\0".join([source, compiler, *flags]).encode() + version).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-tests"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / key[:24]
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            text, partial = Path(folder, "kernels.cu"), Path(folder, "made")
            text.write_text(source, encoding="utf-8")
            command = [compiler, *flags, str(text), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
            assert done.returncode == 0, done.stderr
            partial.replace(made)
    return made


def instantiated(names: list[str]) -> str:
    """The source with these kernels in use, for a CUDA compiler."""
    uses = "\n".join(f"    (void*)&{name}," for name in names)
    return f"{SOURCE.read_text()}\nvoid* kernels[] = {{\n{uses}\n}};\n"


def _value(argument: Any) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return _SCALARS[type(argument)](argument.item())
