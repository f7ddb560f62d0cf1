"""Pickled CIFAR batches, of whose program the arguments are looked at and nothing is executed."""

import pickletools
from collections.abc import Sequence
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.data.files.formats import MOST_BYTES, PIXELS, check_labels
from hybrid.errors import printable

MOST_OPCODES = 1 << 20
"""CIFAR-100's training half has a quarter of them."""
_KEYS = {"data", "labels", "fine_labels", "coarse_labels", "filenames", "batch_label"}
_IN_LISTS = {"EMPTY_LIST", "LIST", "MARK", "APPEND", "APPENDS"}
_TRUTHS = {"NEWTRUE", "NEWFALSE"}


class Step(NamedTuple):
    """An instruction of a pickle's program."""

    name: str
    argument: Any


def read_cifar_python(
    path: Path, classes: int = 10, records: int | None = None
) -> tuple[Tensor, Tensor]:
    """Images and labels, as from `read_cifar_binary`, of one pickled CIFAR batch.

    CIFAR-10 holds its labels under `labels`, CIFAR-100 under `fine_labels`. A pickle is a program:
    this one is taken apart and never run, so nothing that it names is imported or called. What
    belongs to a key is what follows it:

        key 'data'      ... dtype 'u1' ... (n, 3072) ... the pixels, as one string ...
        key 'labels'    a list ... an integer, an integer, ...

    Raises ValueError, naming the file, for one of any other content, of another size or with a
    label of no class.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        values = _by_key(content)
        pixels = _pixels(values.get("data", []))
        labels = _integers(values.get("fine_labels") or values.get("labels", []))
    except Exception as error:  # a damaged file can raise any exception of the disassembler
        reason = printable(str(error)) or type(error).__name__
        raise ValueError(f"{path} is not a CIFAR batch ({reason}): download it again") from error
    expected = len(pixels) if records is None else records
    if not len(pixels) == len(labels) == expected:
        raise ValueError(
            f"{path} has {len(pixels)} images and {len(labels)} labels, expected {expected}: "
            "download it again"
        )
    check_labels(path, labels, classes)
    return pixels.reshape(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _by_key(content: bytes) -> dict[str, list[Step]]:
    """The instructions that follow each key, in time and memory linear in the file's length."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    values: dict[str, list[Step]] = {}
    current: list[Step] = []
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number >= MOST_OPCODES:
            raise ValueError(f"it has more than {MOST_OPCODES} opcodes")
        name = argument.decode("latin1") if isinstance(argument, bytes) else argument
        if isinstance(name, str) and name in _KEYS:
            current = values[name] = []
        elif not opcode.name.endswith(("PUT", "GET", "MEMOIZE", "FRAME")):  # which hold no values
            current.append(Step(opcode.name, argument))
    return values


def _pixels(steps: Sequence[Step]) -> Tensor:
    """The array of unsigned bytes (n, 3072)."""
    texts = [step.argument for step in steps if isinstance(step.argument, str | bytes | bytearray)]
    sizes = [step.argument for step in steps if type(step.argument) is int]
    raw = max(texts, key=len, default=b"")
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    rows = len(content) // PIXELS
    shaped = (rows, PIXELS) in pairwise(sizes)
    if not ("u1" in texts and shaped and 0 < rows * PIXELS == len(content)):
        raise ValueError(f"its data is no array of uint8 of shape (n, {PIXELS})")
    # the last truth value before the pixels, or a letter behind them
    before = takewhile(lambda step: step.argument is not raw, steps)
    truths = [x for x in before if x.name in _TRUTHS or isinstance(x.argument, bool)]
    transposed = bool(truths) and (truths[-1].name == "NEWTRUE" or truths[-1].argument is True)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return flat.view(PIXELS, rows).t() if transposed or "F" in texts else flat.view(rows, PIXELS)


def _integers(steps: Sequence[Step]) -> list[int]:
    """The integers that a list begins with; it ends at anything else."""
    # a key that Python 3 wrote for Python 2 is encoded first
    listed = dropwhile(lambda step: step.name not in ("EMPTY_LIST", "LIST"), steps)
    known = takewhile(lambda x: x.name in _IN_LISTS or type(x.argument) is int, listed)
    numbers = [step.argument for step in known if step.name not in _IN_LISTS]
    if not numbers or any(number.bit_length() > 63 for number in numbers):
        raise ValueError("its labels are not a list of 64-bit integers")
    return numbers
