"""What the test files of the solvers declare of their methods, for the tests that all must pass.

MODES        ways to run it, for every setting to act or to be refused (`setting_modes.Mode`)
EXAMPLES     by name, instances for what every method keeps to
PLAIN        the names of those that are SGD alone, where there is one block
IMPOSSIBLE   pairs of its class and values of its settings, each refused by itself
"""

from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SOLVERS = ROOT / "tests" / "solvers"


def declared(name: str) -> list[Any]:
    """What has that name in each test file of a solver, the others left out."""
    files = sorted(SOLVERS.rglob("test_*.py"))
    having = [file for file in files if f"\n{name} = " in file.read_text()]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in having]
    return [getattr(import_module(module), name) for module in modules]
