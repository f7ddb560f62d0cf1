"""Write the tables of settings from their declarations:  python docs/settings.py

Those are docs/settings.md and, in the pages of the methods, the tables with `HEADER`.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from hybrid.rl.settings import RlSettings
from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED, known_settings, values
from hybrid.settings.resolve import resolve
from hybrid.settings.text import to_toml
from solvers import Backprop, registry

DOCS = Path(__file__).parent
HEAD = """# Settings

Defaults < a TOML file < the command line. Every setting can be given as `--set section.key=value`.
These are all of them, with their defaults, as a run's `config.toml` holds them: what is unset is a
comment that says what that means. A setting that cannot act in a run is refused, with the reason.

```toml
{defaults}```

The table `[solver]` depends on the method:
"""
HEADER = "| setting | default | meaning |\n|---|---|---|\n"

ALONE = ["rounds.correct_every", "rounds.window", "rounds.serial_epochs"]
BESIDE = {
    "augmented-lagrangian": [
        "rounds.window",
        "rounds.sweeps",
        "rounds.correct_every",
        "rounds.serial_epochs",
    ],
    "ampnet": [*ALONE, "model.survival"],
    "bubble-filling": [
        *("rounds.fill", "rounds.fill_step", "rounds.gaps"),
        *("rounds.window", "rounds.sweeps"),
        *("correction.micro_batches", "solver.local_lr", "solver.beta"),
    ],
    "ddg": ALONE,
    "deepfacto": ["model.factorize", "solver.factor_rho"],
    "local-updates": ALONE,
    "replicas": ["split.replicas", "split.blocks", "split.side_by_side", "sync.name"],
}
"""Settings that a page's table has beside its method's own."""
SECTIONS = {
    "sync": "how [replicas](replicas.md) keep together",
    "sampler": "who [chooses the samples](samplers.md)",
}


def written() -> dict[Path, str]:
    """Every page with settings, and the text that the declarations make of it."""
    pages = {DOCS / "settings.md": _all_settings()}
    for path in DOCS.glob("*.md"):
        before, header, after = path.read_text().partition(HEADER)
        if header:
            keys = [*BESIDE.get(path.stem, []), *_own(path.stem)]
            rest = after[after.index("\n\n") :]
            rows = _rl_rows() if path.stem == "rl" else [_row(key, path.stem) for key in keys]
            pages[path] = before + header + "\n".join(rows) + rest
    return pages


def _all_settings() -> str:
    parts = [HEAD.format(defaults=to_toml(resolve({})))]
    for name in registry.OWN:
        config = to_toml(resolve({"solver": {"name": name}}))
        table = config[config.index("[solver]") : config.index("[correction]")]
        parts.append(f"```toml\n{table.strip()}\n```\n")
    for section, text in SECTIONS.items():
        parts.append(f"The table `[{section}]` depends on {text}:\n")
        for name in NAMED[section]:
            config = to_toml(resolve({section: {"name": name}}))
            table = config[config.index(f"[{section}]") :].split("\n\n")[0]
            parts.append(f"```toml\n{table.strip()}\n```\n")
    return "\n".join(parts)


def _home(page: str) -> str:
    """The section whose settings a page is about; empty if none."""
    return next((section for section, known in NAMED.items() if page in known), "")


def _own(method: str) -> list[str]:
    """A method's settings, without those in the table of a method that it derives from."""
    if section := _home(method):
        return [f"{section}.{f.name}" for f in fields(NAMED[section][method])]
    if method not in registry.OWN:
        return []
    cls = registry.solver_class(method)
    above = {
        f.name
        for base in cls.__mro__[1:]
        if HEADER in _page(getattr(base, "name", ""))
        for f in fields(base)
    }
    return [f"solver.{f.name}" for f in fields(cls) if f.init and f.name not in above]


def _page(method: str) -> str:
    path = DOCS / f"{method}.md"
    return path.read_text() if path.exists() else ""


def _row(key: str, page: str) -> str:
    if section := _home(page):
        known = known_settings(registry.DEFAULT, {section: page})
        return f"| `{key}` | {_default(key, page)} | {known[key]} |"
    methods = [page] if page in registry.OWN else [registry.DEFAULT, *registry.OWN]
    method = next(name for name in methods if key in known_settings(name))
    return f"| `{key}` | {_default(key, method)} | {known_settings(method)[key]} |"


def _default(key: str, method: str) -> str:
    section, _, name = key.partition(".")
    made: Any = {"correction": Backprop}.get(section)
    if section in NAMED and method in NAMED[section]:
        made = NAMED[section][method]
    if section == "solver":
        made = registry.solver_class(method)
    if section in NAMED and name == "name":
        return NAMED[section].default
    found = values(made())[name] if made else getattr(getattr(Config(), section), name)
    if found is None:
        return "unset"
    if isinstance(found, float):
        return f"{found:g}"
    return "none" if found in ("", [], {}) else str(found).lower()


def _rl_rows() -> list[str]:
    """Of the command that has settings of its own."""
    rows = []
    for name, field in RlSettings.model_fields.items():
        default = "unset" if field.default is None else field.default
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        shown = shown.lower() if isinstance(default, bool) else shown
        rows.append(f"| `rl.{name}` | {shown} | {field.description} |")
    return rows


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
