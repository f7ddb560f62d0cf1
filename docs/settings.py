"""Write docs/settings.md from the declarations of the settings:  python docs/settings.py"""

from pathlib import Path

from hybrid.settings.resolve import resolve
from hybrid.settings.text import to_toml
from solvers import registry

HEAD = """# Settings

Defaults < a TOML file < the command line. Every setting can be given as `--set section.key=value`.
These are all of them, with their defaults, as a run's `config.toml` holds them.

```toml
{defaults}```

The table `[solver]` depends on the method:
"""


def page() -> str:
    """The page's text."""
    parts = [HEAD.format(defaults=to_toml(resolve({})))]
    for name in registry.OWN:
        config = to_toml(resolve({"solver": {"name": name}}))
        table = config[config.index("[solver]") : config.index("[correction]")]
        parts.append(f"```toml\n{table.strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page())
