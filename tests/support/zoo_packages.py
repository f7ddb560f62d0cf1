"""torchvision, timm and transformers, where they are installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def installed(package: str) -> bool:
    """Whether a package can be had; "" always is."""
    return not package or find_spec(package) is not None


def package(name: str) -> Any:
    """A module of them."""
    return import_module(name)
