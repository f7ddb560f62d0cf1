"""Pickled CIFAR batches, read from the arguments of the pickle's opcodes; nothing is unpickled."""

import pickletools
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.data.files.formats import MOST_BYTES, PIXELS, check_labels
from hybrid.errors import printable

MOST_OPCODES = 1 << 20
"""CIFAR-100's training half has a quarter of them."""
KEYS = {"data", "labels", "fine_labels", "coarse_labels", "filenames", "batch_label"}
LIST_OPCODES = {"EMPTY_LIST", "MARK", "APPEND", "APPENDS"}

Opcode = tuple[str, Any]
"""Name and argument of one instruction of a pickle's program."""


def read_cifar_python(
    path: Path, classes: int = 10, records: int | None = None
) -> tuple[Tensor, Tensor]:
    """Images and labels, as from `read_cifar_binary`, of one batch pickled with protocol 2.

    CIFAR-10 holds its labels under `labels`, CIFAR-100 under `fine_labels`. A pickle is a program.
    This function disassembles it and never runs it, so nothing that it names is imported or called.
    The opcodes that follow a key hold its value:

        key 'data'      ... dtype 'u1' ... (n, 3072) ... Fortran order ... the pixels, a string
        key 'labels'    a list ... an integer, an integer, ...

    Raises ValueError, naming the file, for one of any other content, of another size or with a
    label of no class.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        opcodes = _opcodes_by_key(content)
        pixels = _read_pixels(opcodes.get("data", []))
        labels = _read_integers(opcodes.get("fine_labels") or opcodes.get("labels", []))
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


def _opcodes_by_key(content: bytes) -> dict[str, list[Opcode]]:
    """The opcodes that follow each key, in time and memory linear in the file's length."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    if content[:2] != b"\x80\x02":
        raise ValueError("it is no pickle of protocol 2")
    by_key: dict[str, list[Opcode]] = {}
    current: list[Opcode] = []
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number >= MOST_OPCODES:
            raise ValueError(f"it has more than {MOST_OPCODES} opcodes")
        if isinstance(argument, str) and argument in KEYS:
            current = by_key[argument] = []
        elif not opcode.name.endswith(("PUT", "GET")):  # whose arguments are places in the memo
            current.append((opcode.name, argument))
    return by_key


def _read_pixels(opcodes: list[Opcode]) -> Tensor:
    """The array of unsigned bytes (n, 3072)."""
    texts = [argument for _, argument in opcodes if isinstance(argument, str)]
    sizes = [argument for _, argument in opcodes if type(argument) is int]
    longest = max(texts, key=len, default="")
    content = bytearray(longest, "latin1")
    rows = len(content) // PIXELS
    if not ("u1" in texts and (rows, PIXELS) in pairwise(sizes) and len(content) == rows * PIXELS):
        raise ValueError(f"its data is no array of uint8 of shape (n, {PIXELS})")
    flat = torch.frombuffer(content, dtype=torch.uint8)
    # The last truth value before the bytes says whether they are in Fortran order.
    before = takewhile(lambda opcode: opcode[1] is not longest, opcodes)
    truths = [name for name, _ in before if name in ("NEWTRUE", "NEWFALSE")]
    in_fortran_order = truths[-1:] == ["NEWTRUE"]
    return flat.view(PIXELS, rows).t() if in_fortran_order else flat.view(rows, PIXELS)


def _read_integers(opcodes: list[Opcode]) -> list[int]:
    """The integers that a list begins with; the list ends at anything else."""
    numbers: list[int] = []
    # Python 3 encodes a key of bytes, which takes opcodes between the key and the list.
    for name, argument in dropwhile(lambda opcode: opcode[0] != "EMPTY_LIST", opcodes):
        if type(argument) is int:
            numbers.append(argument)
        elif name not in LIST_OPCODES:
            break
    if not numbers or any(number.bit_length() > 63 for number in numbers):
        raise ValueError("its labels are not a list of 64-bit integers")
    return numbers
