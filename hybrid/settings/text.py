"""Settings as text: the TOML file that repeats a run, and --set."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

import tomli_w

from hybrid.files import read_whole
from hybrid.settings.config import Config, declared_settings
from hybrid.settings.methods import NAMED, known_settings, sections_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


MOST_BYTES, MOST_DOTS = 1 << 16, 2000
"""Of a file of settings; a resolved one has 5 kB."""


def read_toml(path: Path, links: bool = True) -> dict[str, Any]:
    """The tables of a file of settings, whatever is in them; that of a run folder is no link."""
    raw = read_whole(path, MOST_BYTES, links)
    try:
        # the parser's time is quadratic in the parts of a dotted key
        if max(line.count(b".") for line in raw.split(b"\n")) > MOST_DOTS:
            raise ValueError(f"more than {MOST_DOTS} dots in a line")
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Split "section.key=value"; the value is TOML where it parses, else a string."""
    dotted, equals, value = text.partition("=")
    if not equals or "." not in dotted:
        key = dotted.strip()
        named = f"{key}.name"
        places = [named] if named in declared_settings() else sections_of(key)
        meant = " or ".join(f"{place}={value}" for place in places)
        hint = f"; did you mean {meant}?" if equals and places else ""
        raise ValueError(f"--set {text!r}: write --set section.key=value{hint}")
    try:
        return dotted.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return dotted.strip(), value


def to_toml(config: Config) -> str:
    """The settings as a commented TOML file that repeats the run."""
    chosen = {section: getattr(config, section)["name"] for section in NAMED}
    known = known_settings(config.solver["name"], chosen)
    lines: list[str] = []
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            setting = f"# {key} =" if value is None else _written(key, value)
            lines += wrap(
                known[f"{section}.{key}"], 98, initial_indent="# ", subsequent_indent="# "
            )
            lines.append(setting)
        lines.append("")
    return "\n".join(lines)


def _written(key: str, value: Any) -> str:
    """A setting as TOML, the entries of a table a line each."""
    if value and isinstance(value, dict):
        return "\n".join(f"{key}.{_written(inner, v)}" for inner, v in value.items())
    return tomli_w.dumps({key: value}, indent=2).strip() if value != {} else f"{key} = {{}}"
