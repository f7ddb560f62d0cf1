"""Values of a job's ranks as bytes: reading them builds data and runs no code.

8 bytes   length of the text
text      JSON; other types, such as tuples and tensors, are {name: content}
bytes     of every tensor, in the order of the text
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.links.staging import DTYPES, as_dense, format_of, joined_bytes

_KINDS = {"dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}


def encode(value: Any) -> Tensor:
    """Encode a value as bytes (n,); ValueError for a type that `decode` does not read."""
    tensors: list[Tensor] = []
    text = bytearray(json.dumps(_written(value, tensors)), "ascii")
    head = torch.tensor([len(text)]), torch.frombuffer(text, dtype=torch.uint8)
    return joined_bytes([*head, *tensors])


def decode(message: Tensor) -> Any:
    """Decode the bytes of a value into new memory; ValueError for any other bytes."""
    try:
        length = int(message[:8].clone().view(torch.int64))
        text, data = message[8:].split([length, len(message) - 8 - length])
        return _read(json.loads(text.numpy().tobytes()), data)
    except Exception as error:
        raise ValueError(
            f"a rank has sent {len(message)} bytes that are no value ({type(error).__name__}): all "
            "ranks must run the same version of hybrid, and nobody else may reach their ports"
        ) from error


def _written(value: Any, tensors: list[Tensor]) -> Any:
    """Convert a value to JSON types, appending its tensors to a list."""

    def each(values: Iterable[Any]) -> list[Any]:
        return [_written(x, tensors) for x in values]

    if isinstance(value, np.generic):
        value = value.item()
    cls = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if cls is list:
        return each(value)
    if isinstance(value, Tensor) and value.dtype in DTYPES:
        offset = sum(x.nbytes for x in tensors)
        tensors.append(as_dense(value.cpu()))
        return {"tensor": [offset, *format_of(tensors[-1])]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return {"array": each([torch.from_numpy(value.copy())])}
    if isinstance(value, torch.dtype) and value in DTYPES:
        return {"dtype": [DTYPES.index(value)]}
    if isinstance(value, Path):
        return {"path": [str(value)]}
    name = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in name:
        raise ValueError(f"a {name} cannot be sent to other ranks: define its class in a module")
    if is_dataclass(cls):
        return {name: each(getattr(value, field.name) for field in fields(cls))}
    if hasattr(cls, "_fields"):
        return {name: each(value)}
    for kind, builtin in _KINDS.items():
        if isinstance(value, builtin):
            return {kind: each(value.items() if builtin is dict else value)}
    raise ValueError(
        f"a {cls.__module__}.{cls.__qualname__} cannot be sent to other ranks: send numbers, texts "
        "and tensors, in lists, tuples, dicts or dataclasses"
    )


def _read(written: Any, data: Tensor) -> Any:
    """Read what `_written` gave; `data` has the bytes of the tensors."""
    if isinstance(written, list):
        return [_read(x, data) for x in written]
    if not isinstance(written, dict):
        return written
    ((name, content),) = written.items()
    if name == "tensor":
        return _tensor(data, *content)
    values = _read(content, data)
    if name == "dtype":
        return DTYPES[values[0]]
    if name == "path":
        return Path(*values)
    if name == "array":
        return values[0].numpy()
    return _KINDS[name](values) if name in _KINDS else _instance(name, values)


def _tensor(data: Tensor, offset: int, number: int, *layout: int) -> Tensor:
    dtype, dims = DTYPES[number], len(layout) // 2
    memory = data[offset : offset + prod(layout[:dims]) * dtype.itemsize]
    return memory.clone().view(dtype).as_strided(layout[:dims], layout[dims:])


def _instance(name: str, values: list[Any]) -> Any:
    """Build an instance of an imported dataclass or named tuple without running its code."""
    module, _, qualname = name.partition(":")
    cls: Any = sys.modules[module]
    for part in qualname.split("."):
        cls = vars(cls)[part]
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return tuple.__new__(cls, values)
    instance = object.__new__(cls)
    for field, value in zip(fields(cls), values, strict=True):
        object.__setattr__(instance, field.name, value)
    return instance
