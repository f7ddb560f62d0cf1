"""Errors in words."""

import tempfile
import traceback

MOST_CHARACTERS = 1200


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Any text on one line of at most `most` characters, its control characters escaped."""
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} ... {text[-2 * most :]}"
    words = " ".join(text.split())
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return safe if len(safe) <= most else f"{safe[: most * 3 // 4]} ... {safe[-most // 5 :]}"


class AgreedError(ValueError):
    """An error that every rank knows of and raises together: to be told once, by the first."""


def one_line(error: BaseException) -> str:
    """An error's text on one line, with the file's name where the system gives it apart."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        # of a name that is blank, or has a line break, nothing or another name would be seen
        name = str(error.filename)
        shown = name if name.isprintable() and name == name.strip() else ascii(name)
        text = f"{shown}: {error.strerror}"
    return printable(text) or type(error).__name__


def reason(error: BaseException) -> str:
    """What to tell of any error: for one no user should see, also where its traceback is kept."""
    if isinstance(error, (ValueError, OSError)):
        return one_line(error)
    with tempfile.NamedTemporaryFile(
        "w", prefix="hybrid-error-", suffix=".log", delete=False
    ) as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {one_line(error)} (details in {file.name})"
