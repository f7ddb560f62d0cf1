"""Errors in words."""

from __future__ import annotations

import tempfile
import traceback


class AgreedError(ValueError):
    """An error that every rank knows of and raises together: to be told once, by the first."""


def one_line(error: BaseException) -> str:
    """An error's text on one line, with the file's name where the system gives it apart."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def reason(error: BaseException) -> str:
    """What to tell of any error: for one no user should see, also where its traceback is kept."""
    if isinstance(error, (ValueError, OSError)):
        return one_line(error)
    with tempfile.NamedTemporaryFile(
        "w", prefix="hybrid-error-", suffix=".log", delete=False
    ) as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {one_line(error)} (details in {file.name})"
