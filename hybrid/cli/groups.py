"""The help of a command: its flags in groups, as plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

TASK, TRAINING, METHOD = "Network and data", "Training", "Method"
RANKS, FOLDER, MACHINE = "Blocks and replicas", "Run folder", "Machine"


class Grouped(TyperCommand):
    """A command that prints its flags under the `rich_help_panel` of each, in plain lines."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(panel, []).append(record)
        others = groups.pop("Options", [])
        width = min(30, max(len(name) for rows in [*groups.values(), others] for name, _ in rows))
        for panel, rows in [*groups.items(), ("Options", others)]:
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])
