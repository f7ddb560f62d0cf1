"""What the site has beside the pages: README and other files of the root, the commands'
help, the notebook; and how the page of the API shows settings."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator
from copy import copy
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from griffe import (
    Attribute,
    Class,
    Docstring,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
    Parameters,
)
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

LOG = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).parents[1]
ROOTED = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""Page of the site -> the file above docs/ that it is."""


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside the folder of the pages, or in none."""
    from hybrid.cli.app import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="hybrid", title="Commands"
    )
    files.append(File.generated(config, "commands.md", content=text))
    files.append(File.generated(config, "notebook.md", content=_notebook()))
    for page, source in ROOTED.items():
        content = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def _notebook() -> str:
    """The notebook as a page: its texts, its code, and where to get it."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    parts = ["".join(cell["source"]) for cell in cells]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            parts[number] = f"```python\n{parts[number]}\n```"
    return "\n\n".join([*parts, "[Download the notebook](notebook.ipynb)."])


class PlainFields(Extension):
    """Fields of settings as a caller gives them: plain types and defaults, inherited ones too.

    A declaration also says in its type what is allowed and where it has an effect. That is for
    `hybrid explain`.
    """

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """After `dataclasses`, which makes the signatures."""
        page = (ROOT / "docs/api.md").read_text()
        named = re.findall(rf"^::: {pkg.path}\..*?(\w+)$", page, re.MULTILINE)
        for class_ in _classes(pkg):
            if class_.name in named:
                try:
                    cls = getattr(import_module(class_.module.path), class_.name)
                except ImportError as error:  # transformers may not load; the text needs no import
                    LOG.info("%s is shown without a look at its fields: %s", class_.path, error)
                    continue
                if fields := _fields(cls):
                    _show(class_, fields)


def _classes(module: Module) -> Iterator[Class]:
    for member in module.members.values():
        if isinstance(member, Class):
            yield member
        elif isinstance(member, Module):
            yield from _classes(member)


def _fields(cls: type) -> dict[str, tuple[str, str | None]]:
    """Of settings: the type and the default of each, None where there is none."""
    from pydantic import BaseModel

    from hybrid.method.options import Options
    from hybrid.solvers.acting import Settings

    hints = get_type_hints(cls)
    if issubclass(cls, BaseModel):
        declared = cls.model_fields.items()
        defaults = {k: repr(field.get_default(call_default_factory=True)) for k, field in declared}
    elif dataclasses.is_dataclass(cls) and issubclass(cls, (Options, Settings)):
        arguments = (field for field in dataclasses.fields(cls) if field.init)
        defaults = {field.name: _default(field, hints[field.name]) for field in arguments}
    else:
        return {}
    return {name: (_type(hints[name]), default) for name, default in defaults.items()}


def _default(field: dataclasses.Field[Any], hint: Any) -> str | None:
    from hybrid.method.options import Converted

    if get_origin(hint) is Converted and field.default == "":
        return f"{_type(hint).partition(' ')[0]}()"
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else f"{factory.__name__}()"


def _type(hint: Any) -> str:
    """As it is written without what it is annotated with."""
    from hybrid.method.options import Converted

    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if isinstance(hint, list):
        return f"[{', '.join(map(_type, hint))}]"
    shown = [_type(arg) for arg in args]
    if origin is Converted:
        return shown[1]  # what may be given
    if origin in (Union, UnionType):
        return " | ".join(shown)
    if hint in (NoneType, ...):
        return "None" if hint is NoneType else "..."
    return hint.__name__ + (f"[{', '.join(shown)}]" if shown else "")


def _show(class_: Class, fields: dict[str, tuple[str, str | None]]) -> None:
    """Each field as an argument and as an attribute of the class itself, in the same order."""
    by_name = (Parameter(name, kind=ParameterKind.keyword_only) for name in fields)
    init = class_.members.get("__init__") or Function("__init__", parameters=Parameters(*by_name))
    arguments = [_argument(p, *fields[p.name]) for p in init.parameters if p.name in fields]
    init.parameters = Parameters(*arguments)
    shown = {p.name: _attribute(class_, p.name, *fields[p.name]) for p in arguments}
    class_.members = shown | {k: v for k, v in class_.members.items() if k not in shown}
    class_.set_member("__init__", init)


def _argument(parameter: Parameter, type_: str, default: str | None) -> Parameter:
    argument = copy(parameter)  # classes share those that they inherit
    argument.annotation, argument.default = type_, default or parameter.default
    return argument


def _attribute(class_: Class, name: str, type_: str, default: str | None) -> Attribute:
    """One of the class or of its bases."""
    declared = next(c.members[name] for c in (class_, *class_.mro()) if name in c.members)
    attribute = Attribute(
        name, value=default, annotation=type_, lineno=class_.lineno, parent=class_
    )
    attribute.labels = declared.labels
    if declared.docstring is None:
        LOG.warning("%s of %s has no text below its declaration", name, class_.path)
    else:
        attribute.docstring = Docstring(declared.docstring.value, parent=attribute)
    return attribute
