"""The `hybrid` command."""

from hybrid.cli.app import app, main

__all__ = ["app", "main"]
