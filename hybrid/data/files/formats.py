"""Readers of the files that MNIST and CIFAR come in; every fault names the file."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 1 << 28
"""The largest file read; CIFAR-100's training half has 155 MB."""
PIXELS = 3 * 32 * 32
"""Bytes of one of CIFAR's images."""
_DIMENSIONS = 8


def read_idx(path: Path, shape: tuple[int, ...] | None = None) -> Tensor:
    """The uint8 tensor in an IDX file, plain or gzip, in the shape its header states.

    Raises ValueError if the file is not IDX, longer or shorter than its header says, of another
    shape than `shape` (None: any) or of more than MOST_BYTES.
    """
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if zipped else path.open("rb") as stream:
            return _read_idx(path, stream, shape)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): download it again") from error


def _read_idx(path: Path, stream: Any, wanted: tuple[int, ...] | None) -> Tensor:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08" or not 1 <= magic[3] <= _DIMENSIONS:
        raise ValueError(
            f"{path} is not an IDX file of bytes: it starts with {magic.hex() or 'nothing'}, "
            f"not 000008 and the number of dimensions; download it again"
        )
    sizes = stream.read(4 * magic[3])
    shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
    header, expected = 4 + 4 * magic[3], math.prod(shape)
    whole = len(sizes) == 4 * magic[3]
    if whole and wanted not in (None, shape):
        raise ValueError(
            f"{path} holds an array of shape {shape}, expected {wanted}: download it again"
        )
    # one byte more than there should be shows a file that is too long, whatever its length; a
    # damaged header may claim more than the memory holds
    limit = min(expected, MOST_BYTES)
    data = bytearray(stream.read(limit + 1))
    if not whole or not data or len(data) != expected:
        found = f"{4 + len(sizes) + len(data)}{' or more' if len(data) > limit else ''}"
        raise ValueError(
            f"{path} has {found} bytes, expected {header + expected} for the shape {shape} in its "
            "header: download it again"
        )
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)


def read_cifar_binary(
    paths: Sequence[Path], label_bytes: int, records: int | None = None
) -> tuple[Tensor, Tensor]:
    """Images, uint8 `(N, 3, 32, 32)`, and labels, int64 `(N,)`, of the files one after another.

    `label_bytes` is 1 for CIFAR-10 and 2 for CIFAR-100, whose second is the fine label; `records`
    is the number of images each file must hold (None: any). Raises ValueError on another size or
    on a label of no class.
    """
    record, classes = label_bytes + PIXELS, 10 if label_bytes == 1 else 100
    images, labels = [], []
    for path in paths:
        size = path.stat().st_size
        expected = record * (max(1, size // record) if records is None else records)
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, expected {expected} "
                f"({expected // record} records of {record}): download it again"
            )
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, record)
        images.append(data[:, label_bytes:].reshape(-1, 3, 32, 32))
        labels.append(data[:, label_bytes - 1].long())
        check_labels(path, labels[-1].tolist(), classes)
    return torch.cat(images), torch.cat(labels)


def check_labels(path: Path, labels: Sequence[int], classes: int) -> None:
    """Raise ValueError, naming the file and the first fault, unless all are in 0..classes-1."""
    for index, label in enumerate(labels):
        if not 0 <= label < classes:
            raise ValueError(
                f"{path} has the label {label} at image {index}, "
                f"outside 0..{classes - 1}: download it again"
            )
