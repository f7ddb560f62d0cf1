"""What the tables of the TOML file share."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from hybrid.solvers.acting import Acts, nearest, unknown

S = TypeVar("S", bound="Section")

MANY, LARGE = 10**9, 1e15
"""The most that may be asked of a count, and of a real number: beyond, arithmetic overflows."""


class Section(BaseModel):
    """A table of the TOML file; the string after a field is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # where each class has the arguments that its fields declare

        def __init__(self, **given: Any) -> None:
            _check_names(type(self), given, "")
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise ValueError(first_fault(error)) from None

        # validation of a section inside another one does not go through this constructor
        __init__.__pydantic_base_init__ = True

    @field_validator("*", mode="wrap")
    @classmethod
    def _of_its_kind(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        made = handler(value)
        if fault := mistaken(value, made):
            raise PydanticCustomError("kind", f"it must be a valid {fault}")
        return made

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings by name, with their defaults; as in `Settings`."""
        described = cls.model_fields.items()
        return {name: field.get_default(call_default_factory=True) for name, field in described}

    def usual(self) -> dict[str, Any]:
        """Values that go with others where nobody asks for them, in place of their defaults."""
        return {}

    @classmethod
    def of(cls: type[S], section: str, given: Mapping[str, Any]) -> S:
        """The settings of a mapping; ValueError names the `section`, too."""
        _check_names(cls, given, f"{section}.")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ValueError(f"{section}.{first_fault(error)}") from None


def mistaken(given: Any, made: Any) -> str:
    """What a setting should have been: a text is no number, and a number no truth; empty: it is."""
    if isinstance(made, bool):
        return "boolean" * isinstance(given, str | int | float) * (not isinstance(given, bool))
    if isinstance(made, int | float) and isinstance(given, str | bool):
        return "integer" if isinstance(made, int) else "number"
    if isinstance(made, dict) and isinstance(given, dict):
        return next(filter(None, (mistaken(given.get(k), x) for k, x in made.items())), "")
    return ""


def first_fault(error: ValidationError) -> str:
    """The first fault, on one line, with the nearest value of a choice."""
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    place = place if place.isprintable() else repr(place)
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not place:
        return message
    if fault["type"] in ("value_error", "missing") and isinstance(fault["input"], dict):
        # the whole table, which is no value to show
        return f"{place}: {message}"
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        near = nearest(fault["input"], re.findall("'(.*?)'", message))
        message += f"; did you mean {near!r}?" if near else ""
    return f"{place} is {fault['input']!r}; {message.replace('input should', 'it must')}"


def _check_names(cls: type[BaseModel], given: Mapping[str, Any], place: str) -> None:
    strange = next((name for name in given if name not in cls.model_fields), None)
    if strange is not None:
        known = [f"{place}{name}" for name in cls.model_fields]
        raise ValueError(unknown(f"{place}{strange}", known, "setting"))


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstrings, on one line, of a model's fields, or of those a dataclass is made with."""
    if issubclass(cls, BaseModel):
        described = cls.model_fields.items()
        return {name: " ".join((field.description or "").split()) for name, field in described}
    docs: dict[str, str] = {}
    names = {f.name for f in fields(cast(Any, cls)) if f.init}
    for base in reversed(cls.__mro__[:-1]):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for pair in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)) if name in names:
                    docs[name] = " ".join(str(text).split())
    return docs


def is_reference(name: str) -> bool:
    """Whether it names a function, and not what this package has by that name."""
    return ":" in name


def in_commands(*names: str) -> Acts:
    """Where only some of the commands train, bench and plan read a setting."""
    return Acts(f"the command is {' or '.join(names)}", lambda run: run.command in names)


TRAIN = in_commands("train")
TESTED = Acts("there is a validation or test set", lambda run: run.tested)
TRAIN_OR_PLAN = in_commands("train", "plan")
TRAIN_OR_BENCH = in_commands("train", "bench")
