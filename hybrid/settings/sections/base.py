"""The base of the TOML file's tables."""

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
"""Upper limits of counts and of real numbers, beyond which arithmetic overflows."""


class Section(BaseModel):
    """A table of the TOML file; the docstring of a field is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers derive the arguments from the fields

        def __init__(self, **values: Any) -> None:
            _check_names(type(self), values, "")
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ValueError(first_fault(error)) from None

        # validation of a section inside another one does not go through this constructor
        __init__.__pydantic_base_init__ = True

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_kind(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        parsed = handler(value)
        if kind := wrong_kind(value, parsed):
            raise PydanticCustomError("kind", f"it must be a valid {kind}")
        return parsed

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every setting, as in `Settings`."""
        described = cls.model_fields.items()
        return {name: field.get_default(call_default_factory=True) for name, field in described}

    def usual(self) -> dict[str, Any]:
        """Return defaults that depend on other settings, in place of the declared ones."""
        return {}

    @classmethod
    def of(cls: type[S], section: str, values: Mapping[str, Any]) -> S:
        """Validate a mapping; ValueError also names the `section`."""
        _check_names(cls, values, f"{section}.")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(f"{section}.{first_fault(error)}") from None


def wrong_kind(value: Any, parsed: Any) -> str:
    """Name the kind that pydantic parsed from text or a boolean or number; empty if they agree."""
    if isinstance(parsed, bool):
        return "boolean" * isinstance(value, str | int | float) * (not isinstance(value, bool))
    if isinstance(parsed, int | float) and isinstance(value, str | bool):
        return "integer" if isinstance(parsed, int) else "number"
    if isinstance(parsed, dict) and isinstance(value, dict):
        return next(filter(None, (wrong_kind(value.get(k), x) for k, x in parsed.items())), "")
    return ""


def first_fault(error: ValidationError) -> str:
    """Describe the first fault on one line, with the nearest value of a choice."""
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    place = place if place.isprintable() else repr(place)
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not place:
        return message
    if fault["type"] in ("value_error", "missing") and isinstance(fault["input"], dict):
        # the input is the whole table: too long to show
        return f"{place}: {message}"
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        near = nearest(fault["input"], re.findall("'(.*?)'", message))
        message += f"; did you mean {near!r}?" if near else ""
    return f"{place} is {fault['input']!r}; {message.replace('input should', 'it must')}"


def _check_names(cls: type[BaseModel], values: Mapping[str, Any], place: str) -> None:
    for name in values:
        if name not in cls.model_fields:
            names = [f"{place}{field}" for field in cls.model_fields]
            raise ValueError(unknown(f"{place}{name}", names, "setting"))


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings, on one line, of a model's fields or a dataclass's init fields."""
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


def in_commands(*names: str) -> Acts:
    """Make the condition that one of these commands (train, bench, plan) runs."""
    return Acts(f"the command is {' or '.join(names)}", lambda run: run.command in names)


TRAIN = in_commands("train")
TESTED = Acts("there is a validation or test set", lambda run: run.tested)
TRAIN_OR_PLAN = in_commands("train", "plan")
TRAIN_OR_BENCH = in_commands("train", "bench")
