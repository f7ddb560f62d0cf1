"""Texts as bytes: what comes next, after so many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.files import opened
from hybrid.solvers.metrics import right_answers

BYTES = 256
LARGEST = 1 << 40
"""Bytes of a file, whatever the memory."""
STRETCH = 1 << 16
"""Bytes that are held out together, less of a short text."""
ONE_IN = 20
"""One stretch in so many is held out."""
LOOKED_AT = 8192
"""Bytes at a file's beginning among which a zero says that it is no text, as git and grep do."""


def bits_per_byte(out: Tensor, targets: Tensor) -> Tensor:
    """-log2 of the probability of each byte (N, T), of logits (N, 256, T)."""
    return F.cross_entropy(out, targets, reduction="none") / log(2)


@dataclass(frozen=True, eq=False)
class Texts(Data):
    """Windows of `length` bytes, and for each of these the next byte: int64 (B, length) both."""

    text: Tensor
    """uint8 (M,)."""
    starts: Tensor
    """Of the windows, int64 (N,)."""
    length: int
    classes: int = BYTES
    metrics = MappingProxyType({"accuracy": right_answers, "bits_per_byte": bits_per_byte})

    @classmethod
    def empty(cls, length: int) -> Texts:
        """No windows, of that length."""
        return cls(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), length)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shape(self) -> tuple[int]:
        """(length,) of one text."""
        return (self.length,)

    def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
        return self._windows(ids, 0)

    def targets(self, ids: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
        return self._windows(ids, 1)

    def _windows(self, ids: Tensor, shift: int) -> Tensor:
        places = self.starts[ids % len(self), None] + torch.arange(shift, shift + self.length)
        return self.text[places].long()

    def leaves_out(self, target: int) -> bool:
        return False

    def sample(self, count: int) -> tuple[Any, Any]:
        zeros = torch.zeros(count, self.length, dtype=torch.int64)
        return zeros, zeros.clone()

    def take(self, limit: int) -> Texts:
        """The first `limit` windows; raises ValueError unless 1 <= limit <= N."""
        if not 1 <= limit <= len(self):
            raise ValueError(
                f"limit is {limit} but the text has {len(self)} windows of {self.length} bytes: "
                f"choose a limit from 1 to {len(self)}"
            )
        return replace(self, starts=self.starts[:limit])

    def only(self, images: bool, labels: bool) -> Texts:
        """Itself, or for a rank that reads neither end of the network zeros without memory."""
        if images or labels:
            return self
        return replace(self, text=self.text.new_zeros(()).expand_as(self.text))

    def fingerprint(self) -> str:
        """Of the text, since ranks may find other files; empty where there are zeros for it."""
        if self.text.stride() == (0,):
            return ""
        return blake2b(self.text.numpy().data, digest_size=16).hexdigest()


def load_text(path: str | Path, length: int = 256) -> tuple[Texts, Texts]:
    """The text of a file, or of all text files in a folder by their paths; a 20th is held out.

    It is divided into stretches of 65,536 bytes, or a 20th of a shorter text, of which every 20th
    is the test's. ValueError if it is too short, FileNotFoundError if there is none.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"{root} is not there: name a text file or a folder of such")
    files = list(_files(root)) if root.is_dir() else [root]
    parts = [content for file in files if (content := _content(file)) is not None]
    text = b"".join(parts)
    least = ONE_IN * (length + 1)
    if len(text) < least:
        raise ValueError(
            f"{root} has {len(text)} bytes of text, in {len(parts)} files: {least} are needed, 20 "
            f"times a window of {length} and the byte that follows; take a longer one, or a "
            "smaller data.length"
        )
    size = min(STRETCH, len(text) // ONE_IN)
    count = len(text) // size
    within = torch.arange(0, size - length, length)
    starts = size * torch.arange(count)[:, None] + within
    tested = torch.arange(count) % ONE_IN == ONE_IN - 1
    data = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return (
        Texts(data, starts[~tested].flatten(), length),
        Texts(data, starts[tested].flatten(), length),
    )


def _files(folder: Path) -> Iterator[Path]:
    """The regular files of a folder, hidden ones aside, in the order of their paths."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (Path(place) / name).is_file():
                yield Path(place) / name


def _content(file: Path) -> bytes | None:
    """What a file holds, unless that is no text."""
    with opened(file, LARGEST, links=True) as stream:
        head = stream.read(LOOKED_AT)
        return None if b"\0" in head else head + stream.read()
