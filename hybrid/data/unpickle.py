"""A reader of pickled CIFAR batches that builds plain values and calls nothing a file names."""

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
        return _run(content)
    except Exception as error:  # a damaged file can raise any exception of the disassembler
        reason = printable(str(error)) or type(error).__name__
        raise ValueError(f"{path} is not a CIFAR batch ({reason}): download it again") from error


@dataclass
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
            _refuse("it holds an array of impossible shape")
        if not (isinstance(dtype, _Named) and dtype.code):
            _refuse("it holds an array of no plain dtype")
        self.shape, self.code, self.fortran, self.raw = shape, dtype.code, fortran, raw
        return self

    def bytes_of_shape(self, columns: int) -> Tensor | None:
        """The array as a uint8 tensor `(n, columns)`, or None if it is anything else."""
        raw = self.raw.encode("latin1", "ignore") if isinstance(self.raw, str) else self.raw
        if self.code != "u1" or not (isinstance(raw, bytes) and raw):
            return None
        rows = len(raw) // columns
        if self.shape != (rows, columns) or rows * columns != len(raw):
            return None
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return flat.view(columns, rows).t() if self.fortran else flat.view(rows, columns)

    def __str__(self) -> str:
        return f"an array of dtype {ascii(self.code)[:20]} and shape {self.shape}"


@dataclass(frozen=True)
class _Named:
    """A class or function that the file names; a dtype of a `code`."""

    name: str
    code: str = ""


_NAMES = (
    *("numpy.core.multiarray._reconstruct", "numpy.core.numeric._frombuffer"),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
)
_MARK = object()


def _run(content: bytes) -> object:
    """What a pickle, a program for a stack machine, leaves, as far as a CIFAR batch needs it.

    No opcode calls, imports or sets attributes of anything. Work and memory are linear in the
    file's length: a number of bytes, or a place in the memo, is a claim until the bytes are there.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number >= MOST_OPCODES:
            _refuse(f"it has more than {MOST_OPCODES} opcodes")
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                break
            case "MARK":
                stack.append(_MARK)
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case name if name in _OPERATIONS:
                taken = _taken(stack, opcode.stack_before)
                stack.append(_OPERATIONS[name](taken, argument))
            case name:
                _refuse(f"it asks for {name}, refused")
    return _taken(stack, [pickletools.anyobject])[0]


def _taken(stack: list[Any], wanted: list[pickletools.StackObject]) -> list[Any]:
    """The values that an opcode takes off the stack, by the disassembler's description of it."""
    start = len(stack)
    if pickletools.markobject in wanted:
        # all down to the mark, and what the opcode takes below it
        wanted = wanted[: wanted.index(pickletools.markobject)]
        while stack[start - 1] is not _MARK:
            start -= 1
        del stack[start - 1]
        start -= 1
    start -= len(wanted)
    taken = stack[start:] if start >= 0 else [_MARK]
    if any(value is _MARK for value in taken):
        _refuse("it takes what it has not put")
    del stack[start:]
    return taken


def _appended(taken: list[Any]) -> list[Any]:
    target, *values = taken
    if type(target) is not list:
        _refuse(f"it appends to a {type(target).__name__}")
    target.extend(values)
    return target


def _with_items(taken: list[Any]) -> dict[Any, Any]:
    target, *values = taken
    keys = values[::2]
    if type(target) is not dict or not all(isinstance(key, str | bytes) for key in keys):
        _refuse("it holds a mapping that is no dict of names")
    target.update(zip(keys, values[1::2], strict=True))
    return target


def _looked_up(dotted: str) -> _Named:
    if dotted.replace("numpy._core.", "numpy.core.", 1) not in _NAMES:
        _refuse(f"it asks for {printable(dotted, 80)}, refused")
    return _Named(dotted.rpartition(".")[2])


def _called(taken: list[Any]) -> object:
    function, arguments = taken
    if not (isinstance(function, _Named) and isinstance(arguments, tuple)):
        _refuse("it calls what is no function")
    match function.name, arguments:
        case "_reconstruct", _:
            return PickledArray()
        case "dtype", (code, *_):
            return _Named("dtype", _text(code))
        case "encode", (text, *_):
            # Python 3 writes bytes this way into protocols 0 to 2, always in latin1; the text
            # stands for them, since a copy at every call could fill the memory
            return _text(text)
        case "_frombuffer", (raw, dtype, shape, order):
            return PickledArray().fill(shape, dtype, order == "F", raw)
    _refuse(f"it calls {function.name} with {len(arguments)} arguments")


def _built(taken: list[Any]) -> object:
    target, state = taken
    if isinstance(target, PickledArray) and isinstance(state, tuple) and len(state) == 5:
        return target.fill(*state[1:])
    if not (isinstance(target, _Named) and target.code):
        _refuse(f"it sets the state of a {type(target).__name__}")
    # a dtype's state is byte order and the like: of no meaning for bytes
    return target


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        _refuse(f"it has a {type(value).__name__} in place of a text")
    return value


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


def _each(names: str, operation: Callable[[list[Any], Any], Any]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), operation)


_OPERATIONS: dict[str, Callable[[list[Any], Any], Any]] = {
    **_each("INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT", lambda _, x: x),
    **_each("UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 NONE", lambda _, x: x),
    # bytes of Python 2, which the disassembler reads as latin1
    **_each("STRING BINSTRING SHORT_BINSTRING", lambda _, text: text.encode("latin1")),
    **_each("SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8", lambda _, raw: bytes(raw)),
    "NEWTRUE": lambda *_: True,
    "NEWFALSE": lambda *_: False,
    **_each("EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE", lambda taken, _: tuple(taken)),
    **_each("EMPTY_LIST LIST", lambda taken, _: taken),
    **_each("EMPTY_DICT DICT", lambda taken, _: _with_items([{}, *taken])),
    **_each("APPEND APPENDS", lambda taken, _: _appended(taken)),
    **_each("SETITEM SETITEMS", lambda taken, _: _with_items(taken)),
    # the disassembler gives the two lines of GLOBAL with a blank between
    "GLOBAL": lambda _, names: _looked_up(names.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda taken, _: _looked_up(".".join(map(_text, taken))),
    "REDUCE": lambda taken, _: _called(taken),
    "BUILD": lambda taken, _: _built(taken),
}
