"""The docstrings that stand below the fields of a dataclass."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Of every field that a dataclass is made with, through its bases."""
    docs: dict[str, str] = {}
    given = {f.name for f in fields(cls) if f.init}
    for base in reversed(cls.__mro__[:-1]):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for pair in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)) if name in given:
                    docs[name] = one_line(str(text))
    return docs


def one_line(text: str) -> str:
    """A text that the source may have on several lines."""
    return " ".join(text.split())
