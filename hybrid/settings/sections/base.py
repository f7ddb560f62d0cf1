"""What the tables of the TOML file share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hybrid.solvers.acting import Acts


class Section(BaseModel):
    """A table of the TOML file; the string after a field is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def is_reference(name: str) -> bool:
    """Whether it names a function, and not what this package has by that name."""
    return ":" in name


def in_commands(*names: str) -> Acts:
    """Where only some of the commands train, bench and plan read a setting."""
    return Acts(f"the command is {' or '.join(names)}", lambda run: run.command in names)


TRAIN = in_commands("train")
TRAIN_OR_PLAN = in_commands("train", "plan")
TRAIN_OR_BENCH = in_commands("train", "bench")
