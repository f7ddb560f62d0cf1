"""A reader of pickled CIFAR batches that builds plain values and calls nothing a file names."""

import io
import pickle
import pickletools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import printable

MOST_BYTES = 1 << 28
"""The largest file read; CIFAR-100's training half has 155 MB."""
MOST_OPCODES = 1 << 20
"""CIFAR-100's training half has a quarter of them."""

_ADMITTED = re.compile(
    r"PROTO|FRAME|STOP|MARK|MEMOIZE|((LONG_)?BIN)?(PUT|GET)|NONE|NEWTRUE|NEWFALSE|BYTEARRAY8"
    r"|(BIN)?(INT[12]?|FLOAT)|LONG[14]?|(SHORT_)?(BIN)?(STRING|BYTES8?|UNICODE8?)"
    r"|(EMPTY_)?(LIST|DICT|TUPLE)|TUPLE[123]|APPENDS?|SETITEMS?|(STACK_)?GLOBAL|REDUCE|BUILD"
)
# a dict becomes a call of a stand-in, after which the lengths of frames no longer hold
_DICT = b"chybrid\ndict\n)R"
_INSTEAD = {"EMPTY_DICT": _DICT, "DICT": b"1" + _DICT, "FRAME": b""}
_NAMES = (
    *("numpy.core.multiarray._reconstruct", "numpy.core.numeric._frombuffer", "hybrid.dict"),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
)


def unpickle(path: Path) -> object:
    """The lists, dicts, tuples, strings, numbers and `PickledArray`s that `path` holds.

    Any fault, and any other content, is a ValueError that names the file.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return _Reader(io.BytesIO(_admitted(content)), encoding="bytes").load()
    except Exception as error:  # a damaged file can raise any exception of the two readers
        reason = printable(str(error)) or type(error).__name__
        raise ValueError(f"{path} is not a CIFAR batch ({reason}): download it again") from error


def _admitted(content: bytes) -> bytes:
    """The program for the stack machine, if it needs no more than a CIFAR batch does.

    Time and memory are then linear in the file's length: the disassembler has seen the bytes that
    an argument claims, a place in the memo is below the number of opcodes, and no key is hashed but
    text, since the hash of nested tuples takes exponential time and any depth of stack.
    """
    pieces, done = [], 0
    for number, (opcode, argument, start) in enumerate(pickletools.genops(content)):
        if number >= MOST_OPCODES:
            raise ValueError(f"it has more than {MOST_OPCODES} opcodes")
        if not _ADMITTED.fullmatch(opcode.name):
            raise ValueError(f"it asks for {opcode.name}, refused")
        if opcode.name.endswith("PUT") and (argument or 0) > number:
            raise ValueError("it leaves places of its memo empty")
        if opcode.name in _INSTEAD:
            assert start is not None
            pieces += [content[done:start], _INSTEAD[opcode.name]]
            done = start + (9 if opcode.name == "FRAME" else 1)
    return b"".join([*pieces, content[done:]])


class _Reader(pickle.Unpickler):
    """The standard one, in which every name is a stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        if dotted.replace("numpy._core.", "numpy.core.", 1) not in _NAMES:
            raise ValueError(f"it asks for {printable(dotted, 80)}, refused")
        return _Named(name)


@dataclass
class _Named:
    """In place of a class or function that the file names; a dtype of a `code`."""

    name: str
    code: str = ""

    def __call__(self, *arguments: object) -> object:
        match self.name, arguments:
            case "dict", ():
                return _Dict()
            case "_reconstruct", _:
                return PickledArray()
            case "dtype", (str() | bytes() as code, *_) if len(code) < 20:
                return _Named("dtype", code if isinstance(code, str) else code.decode("latin1"))
            case "encode", (str() as text, *_):
                # Python 3 writes bytes this way into protocols 0 to 2, always in latin1; the text
                # stands for them, since a copy at every call could fill the memory
                return text
            case "_frombuffer", (raw, dtype, shape, order):
                return PickledArray().fill(shape, dtype, order == "F", raw)
        raise ValueError(f"it calls {self.name} with {len(arguments)} arguments")

    def __setstate__(self, state: object) -> None:
        if not self.code:  # a dtype's state is byte order and the like: of no meaning for bytes
            raise ValueError(f"it sets the state of {self.name}")


class _Dict(dict[str | bytes, Any]):
    __slots__ = ()

    def __setitem__(self, key: object, value: Any) -> None:
        if not isinstance(key, str | bytes):
            raise ValueError("it holds a mapping that is no dict of names")
        super().__setitem__(key, value)


class PickledArray:
    """What a pickled numpy array is made of, as the file has it."""

    shape: tuple[int, ...] = ()
    code: str = ""
    """Of its dtype."""
    fortran: object = False
    raw: object = b""

    def fill(self, shape: Any, dtype: Any, fortran: object, raw: object) -> "PickledArray":
        """Take over the parts."""
        plain = isinstance(shape, tuple) and len(shape) <= 32
        if not (plain and all(type(n) is int and n.bit_length() < 64 for n in shape)):
            raise ValueError("it holds an array of impossible shape")
        if not (isinstance(dtype, _Named) and dtype.code):
            raise ValueError("it holds an array of no plain dtype")
        self.shape, self.code, self.fortran, self.raw = shape, dtype.code, fortran, raw
        return self

    def __setstate__(self, state: Any) -> None:
        _, *parts = state
        self.fill(*parts)

    def bytes_of_shape(self, columns: int) -> Tensor | None:
        """The array as a uint8 tensor `(n, columns)`, or None if it is anything else."""
        raw = self.raw.encode("latin1", "ignore") if isinstance(self.raw, str) else self.raw
        if self.code != "u1" or not (isinstance(raw, bytes | bytearray) and raw):
            return None
        rows = len(raw) // columns
        if self.shape != (rows, columns) or rows * columns != len(raw):
            return None
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return flat.view(columns, rows).t() if self.fortran else flat.view(rows, columns)

    def __str__(self) -> str:
        return f"an array of dtype {self.code!a} and shape {self.shape}"
