"""What the site has beside the pages: README and other files of the root, the commands' help, the
job scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

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
    for page, source in ROOTED.items():
        content = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    for script in sorted((ROOT / "jobs").iterdir()):
        files.append(File.generated(config, f"jobs/{script.name}", content=script.read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the job scripts lead to their copies."""
    return markdown.replace("](../jobs/", "](jobs/")
