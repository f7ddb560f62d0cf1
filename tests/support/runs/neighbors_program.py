"""The examples of a page on neighbors, run here or on ranks."""

import os
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from world import launched
from zoo_packages import package

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def run(name: str, folder: Path) -> dict[str, Any]:
    """What an example defines, and what it has printed as "printed"."""
    package("transformers")
    folder.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(StringIO()) as printed:
            names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        os.chdir(before)
    return names | {"printed": printed.getvalue()}


def on_ranks(comm: Any, name: str, folder: Path) -> None:
    """An example as every rank of an mpirun runs it."""
    with launched(comm):
        run(name, folder)
