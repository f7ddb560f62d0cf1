"""What the tables of the TOML file share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hybrid.solvers.acting import Acts
from hybrid.solvers.checks import nearest, unknown

S = TypeVar("S", bound="Section")


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

    @classmethod
    def of(cls: type[S], section: str, given: Mapping[str, Any]) -> S:
        """The settings of a mapping; ValueError names the `section`, too."""
        _check_names(cls, given, f"{section}.")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ValueError(f"{section}.{first_fault(error)}") from None


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


def is_reference(name: str) -> bool:
    """Whether it names a function, and not what this package has by that name."""
    return ":" in name


def in_commands(*names: str) -> Acts:
    """Where only some of the commands train, bench and plan read a setting."""
    return Acts(f"the command is {' or '.join(names)}", lambda run: run.command in names)


TRAIN = in_commands("train")
TRAIN_OR_PLAN = in_commands("train", "plan")
TRAIN_OR_BENCH = in_commands("train", "bench")
