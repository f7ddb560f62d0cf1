"""Settings that had a British spelling: it is accepted, and the present name is reported."""

from __future__ import annotations

from typing import Any

SECTIONS = {"optimiser": "optimizer"}
KEYS = {
    ("model", "factorise"): "factorize",
    ("solver", "optimiser"): "optimizer",
    ("sync", "optimiser_state"): "optimizer_state",
}
"""(section, the former key) -> the key."""


def respelled(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A tree of settings with the present names, and one sentence for each that was different.

    ValueError for a setting that is given in both spellings.
    """
    notices: list[str] = []
    found: dict[str, Any] = {}
    for section, table in tree.items():
        _put(found, section, SECTIONS.get(section, section), table, "", notices)
    for (section, former), key in KEYS.items():
        table = found.get(section)
        if isinstance(table, dict) and former in table:
            renamed: dict[str, Any] = {}
            for name, value in table.items():
                present = key if name == former else name
                _put(renamed, name, present, value, f"{section}.", notices)
            found[section] = renamed
    return found, notices


def _put(
    into: dict[str, Any], former: str, name: str, value: Any, section: str, notices: list[str]
) -> None:
    if name in into:
        raise ValueError(
            f"{section}{name} is given twice, once in its former spelling: give it once"
        )
    into[name] = value
    if former != name:
        notices.append(f"{section}{former} is read as {section}{name}, its present spelling")
