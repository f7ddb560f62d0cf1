"""Settings that had a British spelling: it is accepted, and the present name is reported."""

from __future__ import annotations

from typing import Any

SECTIONS = {"optimiser": "optimizer"}
KEYS = {
    ("solver", "optimiser"): "optimizer",
}
"""(section, the former key) -> the key."""


def respelled(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A tree of settings with the present names, and one sentence for each that was different.

    ValueError for a setting that is given in both spellings.
    """
    notices: list[str] = []
    found: dict[str, Any] = {}
    for former, table in tree.items():
        section = SECTIONS.get(former, former)
        if section != former:
            notices.append(_notice(former, section))
        if not isinstance(table, dict) or not isinstance(found.get(section, {}), dict):
            _put(found, section, table, section)
            continue
        present = found.setdefault(section, {})
        for name, value in table.items():
            key = KEYS.get((section, name)) or name
            if key != name:
                notices.append(_notice(f"{section}.{name}", f"{section}.{key}"))
            _put(present, key, value, f"{section}.{key}")
    return found, notices


def _notice(former: str, present: str) -> str:
    return f"{former} is read as {present}, its present spelling"


def _put(into: dict[str, Any], name: str, value: Any, dotted: str) -> None:
    if name in into:
        raise ValueError(f"{dotted} is given twice, once in its former spelling: give it once")
    into[name] = value
