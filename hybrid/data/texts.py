"""Texts as bytes: windows, and the byte that follows each of theirs."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.data.dataset import Data
from hybrid.files import naming, opened
from hybrid.registries import LONGEST_TEXT
from hybrid.solvers.metrics import right_answers
from hybrid.solvers.state import State

BYTES = 256
RUN_FILES = {"config.toml", "metrics.jsonl"}
"""What a run folder holds, which a training writes where it may read."""
STRETCH = 1 << 16
"""Bytes that are held out together, less of a short text."""
ONE_IN = 20
"""One stretch of this number is held out."""
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
    digest: str = ""
    """Of the whole text, on every rank, whatever of it that keeps."""
    classes: int = BYTES
    metrics = MappingProxyType({"accuracy": right_answers, "bits_per_byte": bits_per_byte})

    @classmethod
    def empty(cls, length: int, count: int = 0) -> "Texts":
        """Windows of that length without text in them, by default none."""
        zeros = torch.zeros((), dtype=torch.uint8).expand(length + 1)
        return cls(zeros, torch.zeros(count, dtype=torch.int64), length)

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

    def subset(self, ids: Tensor) -> "Texts":
        return replace(self, starts=self.starts[ids])

    def only(self, images: bool, labels: bool) -> "Texts":
        """Itself, or for a rank that reads neither end of the network zeros without memory."""
        if images or labels:
            return self
        return replace(self, text=self.text.new_zeros(()).expand_as(self.text))

    def fingerprint(self) -> str:
        return self.digest

    def state(self) -> State:
        return State(shared={"digest": self.digest})

    def load_state(self, state: State) -> None:
        if state.shared.get("digest", self.digest) != self.digest:
            raise ValueError(
                f"the text has {len(self.text)} bytes that are not those of before, and a run goes "
                "on with the same: put back the files of data.dir, or begin another run"
            )


def load_text(path: str | Path, length: int = 256) -> tuple[Texts, Texts]:
    """The text of a file, or of all text files in a folder; about a 20th is held out.

    A folder's files come by their names, before those of the folders in it. What is hidden, is a
    run folder of this package or holds zeros is left out. The text is divided into stretches of
    65,536 bytes, or a 20th of a shorter one, of which every 20th is the test's.

    ValueError for a length out of range or too short a text, FileNotFoundError if there is none.
    """
    if not 1 <= length <= LONGEST_TEXT:
        raise ValueError(f"length is {length}: it must be 1 to {LONGEST_TEXT} bytes")
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"{root} is not there: name a text file or a folder of such")
    read, files = bytearray(), 0
    for file in _files(root) if root.is_dir() else [root]:
        files += _append(read, file)
    least = ONE_IN * (length + 1)
    if len(read) < least:
        raise ValueError(
            f"{root} has {len(read)} bytes of text, in {files} files: {least} are needed, 20 "
            f"times a window of {length} and the byte that follows; take a longer one, or a "
            "smaller data.length"
        )
    size = min(STRETCH, len(read) // ONE_IN)
    count = len(read) // size
    within = torch.arange(0, size - length, length)
    starts = size * torch.arange(count)[:, None] + within
    tested = torch.arange(count) % ONE_IN == ONE_IN - 1
    data = torch.frombuffer(read, dtype=torch.uint8)
    digest = blake2b(read, digest_size=16).hexdigest()
    halves = (starts[chosen].flatten() for chosen in (~tested, tested))
    train, test = (Texts(data, each, length, digest) for each in halves)
    return train, test


def _files(folder: Path) -> Iterator[Path]:
    """The regular files of a folder that `load_text` reads, in its order."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        if {*names} >= RUN_FILES:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (Path(place) / name).is_file():
                yield Path(place) / name


def _append(text: bytearray, file: Path) -> bool:
    """Append a file's text; report a file that is no text; ValueError for too much text."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 - len(text)
    with naming(file), opened(file, room, links=True) as stream:
        head = stream.read(LOOKED_AT)
        if b"\0" in head:
            return False
        text += head
        while part := stream.read(1 << 20):  # at once it would take its size again
            text += part
    return True
