"""A reader of pickled CIFAR batches that builds plain values and calls nothing a file names."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hybrid.errors import printable

MOST_BYTES = 1 << 28
"""The largest file read; CIFAR-100's training half has 155 MB."""
MOST_OPCODES = 1 << 20
"""CIFAR-100's training half has a quarter of them."""


def unpickle(path: Path) -> object:
    """The lists, dicts, tuples, strings, numbers and `PickledArray`s that `path` holds.

    Any fault, and any other content, is a ValueError that names the file.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        if len(content) > MOST_BYTES:
            _refuse(f"it has more than {MOST_BYTES} bytes")
        return _Machine(len(content)).run(content)
    except Exception as error:  # a damaged file can raise any exception of the disassembler
        reason = printable(str(error)) or type(error).__name__
        raise ValueError(f"{path} is not a CIFAR batch ({reason}): download it again") from error


@dataclass
class PickledArray:
    """What a pickled numpy array is made of, as the file has it."""

    shape: tuple[int, ...] = ()
    dtype: _Dtype | None = None
    fortran: object = False
    raw: object = b""

    def fill(self, shape: Any, dtype: Any, fortran: object, raw: object) -> None:
        """Take over the parts."""
        plain = isinstance(shape, tuple) and len(shape) <= 32
        if not (plain and all(type(n) is int and n.bit_length() < 64 for n in shape)):
            _refuse("it holds an array of impossible shape")
        if not isinstance(dtype, _Dtype):
            _refuse("it holds an array of no plain dtype")
        self.shape, self.dtype, self.fortran, self.raw = shape, dtype, fortran, raw

    def bytes_of_shape(self, columns: int) -> Tensor | None:
        """The array as a uint8 tensor `(n, columns)`, or None if it is anything else."""
        if self.dtype is None or self.dtype.code != "u1":
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


@dataclass(frozen=True)
class _Dtype:
    code: str

    def __str__(self) -> str:
        return ascii(self.code)[:20]


@dataclass(frozen=True)
class _Named:
    """A class or function that the file names."""

    name: str


_NAMES = {
    "numpy.core.multiarray._reconstruct": _Named("reconstruct"),
    "numpy._core.multiarray._reconstruct": _Named("reconstruct"),
    "numpy.core.numeric._frombuffer": _Named("frombuffer"),
    "numpy._core.numeric._frombuffer": _Named("frombuffer"),
    "numpy.ndarray": _Named("ndarray"),
    "numpy.dtype": _Named("dtype"),
    "_codecs.encode": _Named("encode"),
}


class _Machine:
    """The stack machine that a pickle is a program of, as far as a CIFAR batch needs it.

    No opcode calls, imports or sets attributes of anything. Work and memory are linear in the
    file's length: a number of bytes, or a place in the memo, is a claim until the bytes are there.
    """

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.to_encode = size
        """Characters that `_codecs.encode` may still copy."""

    def run(self, content: bytes) -> object:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number >= MOST_OPCODES:
                _refuse(f"it has more than {MOST_OPCODES} opcodes")
            if opcode.name == "STOP":
                break
            if opcode.name not in _OPERATIONS:
                _refuse(f"it asks for {opcode.name}, refused")
            _OPERATIONS[opcode.name](self, argument)
        return self.take(1)[0]

    def take(self, number: int) -> list[Any]:
        """The uppermost values, off the stack."""
        start = len(self.stack) - number
        if start < (self.marks[-1] if self.marks else 0):
            _refuse("it takes what it has not put")
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def since_mark(self) -> list[Any]:
        if not self.marks:
            _refuse("it takes what it has not put")
        start = self.marks.pop()
        return self.take(len(self.stack) - start)

    def put(self, value: object) -> None:
        self.stack.append(value)

    def skip(self, _: object) -> None:
        """What says nothing about the content."""

    def put_text(self, text: str) -> None:
        # bytes of Python 2, which the disassembler reads as latin1
        self.put(text.encode("latin1"))

    def put_bytes(self, content: bytes | bytearray) -> None:
        self.put(bytes(content))

    def mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def append(self, values: list[Any]) -> None:
        (target,) = self.take(1)
        if type(target) is not list:
            _refuse(f"it appends to a {type(target).__name__}")
        target.extend(values)
        self.put(target)

    def set_items(self, values: list[Any]) -> None:
        (target,) = self.take(1)
        keys = values[::2]
        if type(target) is not dict or not all(isinstance(key, str | bytes) for key in keys):
            _refuse("it holds a mapping that is no dict of names")
        target.update(zip(keys, values[1::2], strict=True))
        self.put(target)

    def make_dict(self, _: object) -> None:
        values = self.since_mark()
        self.put({})
        self.set_items(values)

    def remember(self, place: int | None) -> None:
        (value,) = self.take(1)
        self.memo[len(self.memo) if place is None else place] = value
        self.put(value)

    def recall(self, place: int) -> None:
        if place not in self.memo:
            _refuse(f"it recalls {place}, which it has not kept")
        self.put(self.memo[place])

    def look_up(self, dotted: str) -> None:
        if dotted not in _NAMES:
            _refuse(f"it asks for {printable(dotted, 80)}, refused")
        self.put(_NAMES[dotted])

    def look_up_pair(self, _: object) -> None:
        self.look_up(".".join(_text(part) for part in self.take(2)))

    def call(self, _: object) -> None:
        function, arguments = self.take(2)
        if not (isinstance(function, _Named) and isinstance(arguments, tuple)):
            _refuse("it calls what is no function")
        match function.name, arguments:
            case "reconstruct", _:
                self.put(PickledArray())
            case "dtype", (code, *_):
                self.put(_Dtype(_text(code)))
            case "encode", (text, *_):
                # Python 3 writes bytes this way into protocols 0 to 2, always in latin1
                self.to_encode -= len(_text(text))
                if self.to_encode < 0:
                    _refuse("it encodes more than it holds")
                self.put(_text(text).encode("latin1"))
            case "frombuffer", (raw, dtype, shape, order):
                array = PickledArray()
                array.fill(shape, dtype, order == "F", raw)
                self.put(array)
            case _:
                _refuse(f"it calls {function.name} with {len(arguments)} arguments")

    def build(self, _: object) -> None:
        target, state = self.take(2)
        if isinstance(target, PickledArray) and isinstance(state, tuple) and len(state) == 5:
            target.fill(*state[1:])
        elif not isinstance(target, _Dtype):
            _refuse(f"it sets the state of a {type(target).__name__}")
        # a dtype's state is byte order and the like: of no meaning for bytes
        self.put(target)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        _refuse(f"it has a {type(value).__name__} in place of a text")
    return value


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


Operation = Callable[[_Machine, Any], None]
_INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
_STRINGS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_BYTES = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8")
_OPERATIONS: dict[str, Operation] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.skip),
    **dict.fromkeys((*_INTEGERS, *_STRINGS, "FLOAT", "BINFLOAT"), _Machine.put),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _Machine.put_text),
    **dict.fromkeys(_BYTES, _Machine.put_bytes),
    "NONE": lambda machine, _: machine.put(None),
    "NEWTRUE": lambda machine, _: machine.put(True),
    "NEWFALSE": lambda machine, _: machine.put(False),
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": lambda machine, _: machine.put(()),
    "TUPLE1": lambda machine, _: machine.put(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.put(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.put(tuple(machine.take(3))),
    "TUPLE": lambda machine, _: machine.put(tuple(machine.since_mark())),
    "EMPTY_LIST": lambda machine, _: machine.put([]),
    "LIST": lambda machine, _: machine.put(machine.since_mark()),
    "APPEND": lambda machine, _: machine.append(machine.take(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "EMPTY_DICT": lambda machine, _: machine.put({}),
    "DICT": _Machine.make_dict,
    "SETITEM": lambda machine, _: machine.set_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    # the disassembler gives the two lines of GLOBAL with a blank between
    "GLOBAL": lambda machine, names: machine.look_up(names.replace(" ", ".", 1)),
    "STACK_GLOBAL": _Machine.look_up_pair,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}
