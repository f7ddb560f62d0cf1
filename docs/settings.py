"""Write docs/settings.md, all settings with their defaults:  python docs/settings.py"""

import re
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED, declaring, known_settings, values
from hybrid.solvers import acting, registry
from hybrid_rl.settings import RlSettings

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

`--set section.key=value` overrides a TOML file, which overrides these defaults (in parentheses:
other values). A setting is rejected unless its conditions hold (″: as above; train/plan: only these
commands read it). `hybrid explain SECTION.KEY` prints a setting, `hybrid train --print-config` a
run's file.
"""
CORRECTION = """
## correction

The serial passes of a hybrid have the settings of [`backprop`](#backprop), such as
`correction.messages`.
"""
OTHERS = """
## rl

Settings of [`hybrid rl`](rl.md), which also reads `[links]`.

"""
REASON = re.compile(r", (?:since|as|with|which|whose|because)\b.*")
"""What the table leaves out of a condition; `hybrid explain` has it."""
COMMAND = re.compile(r"^the command is (\w+)(?: or (\w+))?")
EQUAL = re.compile(
    r"\b(\w+\.\w+) is (not )?(?!(?:not|an?|above|at|unset|your)\b)'?([\w-]+)(?![\w-])'?(?! or|,)"
)
ABOVE = re.compile(r"\b(\w+\.\w+)(?: is)? above (\d+)")


class Row(NamedTuple):
    """A setting in a table."""

    default: str
    text: str
    where: str = ""


Rows = dict[str, Row]


def written() -> str:
    """The page, as the declarations make it."""
    sections = (_section(section) for section in Config.model_fields)
    return "".join([HEAD, *sections, OTHERS, _table("rl", _declared(RlSettings))])


def _section(section: str) -> str:
    if section == "correction":
        return CORRECTION
    kinds = _kinds(section)
    texts = known_settings(registry.DEFAULT)
    defaults = dict(getattr(Config(), section))
    shown = {"name": defaults["name"]} if kinds else defaults
    rows = {key: _row(section, key, value, texts) for key, value in shown.items()}
    text = f"\n## {section}\n\n{_table(section, rows)}"
    methods = [name for name in kinds if kinds[name] in _kinds("solver").values()]
    if section != "solver" and methods:
        links = " and ".join(f"[`{name}`](#{name})" for name in methods)
        return f"{text}\nIt has the settings of {links}, such as `{section}.beta`.\n"
    return text + "".join(f"\n### `{name}`\n\n{_own(section, name, kinds)}" for name in kinds)


def _kinds(section: str) -> dict[str, type]:
    """What the `name` of a section may name; none where a section has no such setting."""
    if section == "solver":
        return {name: registry.solver_class(name) for name in registry.OWN}
    named = NAMED.get(section)
    return {} if named is None else {name: named[name] for name in named.places}


def _own(section: str, name: str, kinds: dict[str, type]) -> str:
    """The table of a method, a strategy or a sampler; of one like an earlier one, what differs."""
    rows = _rows(section, name, kinds[name])
    if not rows:
        return "No settings.\n"
    others = {other: _rows(section, other, kinds[other]) for other in takewhile(name.__ne__, kinds)}
    others = {other: found for other, found in others.items() if found}
    near = min(others, key=lambda other: len(_differing(rows, others[other])), default="")
    if not near or len(_differing(rows, others[near])) > len(rows):
        return _table(section, rows)
    new = {key: row for key, row in rows.items() if others[near].get(key) != row}
    missing = ", ".join(f"`{key}`" for key in others[near] if key not in rows)
    but = f" without {missing}" if missing else ""
    text = fill(f"As [`{near}`](#{near}){but}{', except:' if new else '.'}", 119)
    return f"{text}\n\n{_table(section, new)}" if new else f"{text}\n"


def _differing(rows: Rows, others: Rows) -> set[str]:
    return {key for key in rows | others if rows.get(key) != others.get(key)}


def _rows(section: str, name: str, make: Any) -> Rows:
    texts = known_settings(name if section == "solver" else registry.DEFAULT, {section: name})
    return {key: _row(section, key, x, texts, name) for key, x in values(make()).items()}


def _row(section: str, key: str, value: Any, texts: dict[str, str], owner: str = "") -> Row:
    text, cls = texts[f"{section}.{key}"], declaring(section, owner)
    if key not in acting.declared(cls):
        return Row(_shown(value), text)
    asked = acting.conditions(cls, section, key, whole_section=False)
    where = "; ".join(dict.fromkeys(_brief(condition.where) for condition in asked))
    choices = [str(x) for x in acting.declared(cls)[key].choices if x not in (value, True)]
    also = "" if all(x in text for x in choices) else f" ({', '.join(choices)})"
    return Row(_shown(value) + also, text, where)


def _brief(where: str) -> str:
    """A condition without its reason, in the letters of `--set`."""
    text = COMMAND.sub(lambda x: "/".join(filter(None, x.groups())), REASON.sub("", where))
    text = EQUAL.sub(lambda x: f"{x[1]}{'≠' if x[2] else '='}{x[3]}", text)
    return ABOVE.sub(r"\1>\2", text)


def _declared(settings: Any) -> Rows:
    """Of a command of another package, which has settings of its own."""
    fields = settings.model_fields.items()
    return {key: Row(_shown(field.default), field.description or "") for key, field in fields}


def _table(section: str, rows: Rows) -> str:
    titles = ["Name", "Default", "Meaning"]
    titles += ["Conditions"] * any(row.where for row in rows.values())
    lines = [titles, ["---"] * len(titles)]
    before = ""
    for key, (default, text, where) in rows.items():
        same = " " in where and where == before
        lines += [[f"`{section}.{key}`", default, text, "″" if same else where][: len(titles)]]
        before = where
    escaped = ("|".join(cell.replace("|", r"\|") for cell in line) for line in lines)
    return "".join(f"|{line}|\n" for line in escaped)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"`{value:g}`"
    if value == ():
        return "`[]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value or repr(value)}`"


if __name__ == "__main__":
    PAGE.write_text(written())
