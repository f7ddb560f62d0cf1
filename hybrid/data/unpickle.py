"""An unpickler for the CIFAR batches that runs no code but its own."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def unpickle(path: Path) -> object:
    """The lists, dicts, tuples, strings, numbers and `PickledArray`s that `path` holds.

    Any fault, and any other type, is a ValueError that names the file.
    """
    with path.open("rb") as file:
        try:
            return _Unpickler(file, encoding="bytes").load()
        except Exception as error:  # a damaged pickle can raise any exception there is
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{path} is not a CIFAR batch ({reason}): download it again"
            ) from error


class PickledArray:
    """Stands in for a pickled numpy array, so that no code of numpy runs on untrusted input."""

    shape: tuple[int, ...] = ()
    dtype: "_Dtype | None" = None
    fortran: object = False
    raw: object = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, self.fortran, self.raw = state
        if not all(type(size) is int and size.bit_length() < 64 for size in shape):
            raise pickle.UnpicklingError("it holds an array of impossible shape")
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("it holds an array of no plain dtype")
        self.shape, self.dtype = tuple(shape), dtype

    def bytes_of_shape(self, columns: int) -> Tensor | None:
        """The array as a uint8 tensor `(n, columns)`, or None if it is anything else."""
        if self.dtype is None or self.dtype.code not in (b"u1", "u1"):
            return None
        if not (isinstance(self.raw, bytes) and self.raw):
            return None
        rows = len(self.raw) // columns
        if self.shape != (rows, columns) or rows * columns != len(self.raw):
            return None
        flat = torch.frombuffer(bytearray(self.raw), dtype=torch.uint8)
        return flat.view(columns, rows).t() if self.fortran else flat.view(rows, columns)

    def __str__(self) -> str:
        return f"an array of dtype {self.dtype} and shape {self.shape}"


@dataclass
class _Dtype:
    code: bytes | str
    align: object = False
    copy: object = False

    def __post_init__(self) -> None:
        if not isinstance(self.code, bytes | str):
            raise pickle.UnpicklingError("it holds an array of no plain dtype")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: of no meaning for bytes."""

    def __str__(self) -> str:
        text = self.code.decode("latin1") if isinstance(self.code, bytes) else self.code
        return ascii(text)[:20]


def _reconstruct(*_: object) -> PickledArray:
    return PickledArray()


def _encode(text: str, _codec: object = None) -> bytes:
    # Python 3 writes bytes this way into a pickle of protocol 2, always in latin1
    return text.encode("latin1")


_STAND_INS = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.ndarray": PickledArray,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, refused") from None
