"""A second name for a package, which leads to the same modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _ShortName(MetaPathFinder, Loader):
    """Answers an import of `short.x` with the module `full.x`, which is executed once."""

    def __init__(self, short: str, full: str) -> None:
        self._short, self._full = short, full
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{self._short}."):
            return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._full + spec.name[len(self._short) :])
        self._specs[spec.name] = module.__spec__  # which the import system is about to replace
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = self._specs.pop(spec.name)


def add_short_name(short: str, full: str) -> None:
    """Let `import short`, and all modules in it, give those of the package `full`."""
    sys.meta_path.insert(0, _ShortName(short, full))
    sys.modules[short] = import_module(full)
