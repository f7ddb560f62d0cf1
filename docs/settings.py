"""Write docs/settings.md, all settings with their defaults:  python docs/settings.py"""

import re
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from typing import Any

from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED, declaring, known_settings, values
from hybrid.solvers import acting, registry

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

The command line (`--set section.key=value`) overrides a TOML file, and the file overrides the
default, which stands here. "unset" means that no value is given. Small numbers are of the
[conditions](#conditions) under which a setting has an effect; elsewhere it is rejected.
`hybrid explain SECTION.KEY` prints the same, and `hybrid train --print-config` the file of a run.
"""
CORRECTION = """
## correction

The serial passes of a hybrid have the settings of [`backprop`](#backprop), as `correction.messages`
for instance. `correction.micro_batches` is the method's own number where serial rounds stand beside
a delayed method.
"""
OTHERS = """
## {name}

These are the settings of [`hybrid {name}`]({name}.md), which has `[links]` beside them.

"""
CONDITIONS: dict[str, int] = {}
"""Condition -> its number, in the order in which the page comes to them."""
REASON = re.compile(r", (?:since|as|with|which|whose)\b.*")
"""What `hybrid explain` says beside a condition."""
Rows = dict[str, tuple[str, str]]
"""Setting -> its default and its meaning."""


def written() -> str:
    """The page, as the declarations make it."""
    sections = (_section(section) for section in Config.model_fields)
    others = (
        OTHERS.format(name=point.name) + _list(point.name, _declared(point.load()))
        for point in entry_points(group="hybrid.settings")
    )
    lists = [*sections, *others]
    numbered = (f"{number}. {where}" for where, number in CONDITIONS.items())
    rows = (f"{fill(line, 119, subsequent_indent='    ')}\n" for line in numbered)
    return "".join([HEAD, *lists, "\n## Conditions\n\n", *rows])


def _section(section: str) -> str:
    if section == "correction":
        return CORRECTION
    kinds = _kinds(section)
    known = known_settings(registry.DEFAULT)
    made = dict(getattr(Config(), section))
    found = {"name": made["name"]} if kinds else made
    rows = {
        key: (_shown(value) + "`" + _where(section, key), known[f"{section}.{key}"])
        for key, value in found.items()
    }
    return f"\n## {section}\n\n{_list(section, rows)}" + "".join(
        f"\n### `{name}`\n\n{_own(section, name, kinds)}" for name in kinds
    )


def _kinds(section: str) -> dict[str, type]:
    """What the `name` of a section may name; none where a section has no such setting."""
    if section == "solver":
        return {name: registry.solver_class(name) for name in registry.OWN}
    return {name: NAMED[section][name] for name in NAMED.get(section, ())}


def _own(section: str, name: str, kinds: dict[str, type]) -> str:
    """The list of a method, a strategy or a sampler; of one like an earlier one, what differs."""
    rows = _rows(section, name, kinds[name])
    if not rows:
        return "It has no settings.\n"
    others = {other: _rows(section, other, kinds[other]) for other in takewhile(name.__ne__, kinds)}
    near = min(others, key=lambda other: len(_differing(rows, others[other])), default="")
    if not near or len(_differing(rows, others[near])) > len(rows):
        return _list(section, rows)
    new = {key: row for key, row in rows.items() if others[near].get(key) != row}
    missing = ", ".join(f"`{key}`" for key in others[near] if key not in rows)
    but = f" without {missing}" if missing else ""
    also = ", with these in addition or instead:" if new else "."
    text = fill(f"It has the settings of [`{near}`](#{near}){but}{also}", 119)
    return f"{text}\n\n{_list(section, new)}" if new else f"{text}\n"


def _differing(rows: Rows, others: Rows) -> set[str]:
    return {key for key in rows | others if rows.get(key) != others.get(key)}


def _rows(section: str, name: str, made: Any) -> Rows:
    known = known_settings(name if section == "solver" else registry.DEFAULT, {section: name})
    return {
        key: (_shown(value) + "`" + _where(section, key, name), known[f"{section}.{key}"])
        for key, value in values(made()).items()
    }


def _where(section: str, key: str, owner: str = "") -> str:
    """The numbers of a setting's conditions; none where it always has an effect."""
    cls = declaring(section, owner)
    if key not in acting.declared(cls):
        return ""
    asked = acting.conditions(cls, section, key, whole_section=False)
    texts = [REASON.sub("", condition.where) for condition in asked]
    numbers = {CONDITIONS.setdefault(text, len(CONDITIONS) + 1) for text in texts}
    return f"<sup>{','.join(map(str, sorted(numbers)))}</sup>" if numbers else ""


def _declared(settings: Any) -> Rows:
    """Of a command of another package, which has settings of its own."""
    found = settings.model_fields.items()
    return {key: (_shown(field.default) + "`", field.description or "") for key, field in found}


def _list(section: str, rows: Rows) -> str:
    lines = (f"- `{section}.{key}={default}: {text}" for key, (default, text) in rows.items())
    return "".join(f"{fill(line, 119, subsequent_indent='  ')}\n" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if value in ("", [], {}):
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(written())
