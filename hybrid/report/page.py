"""A self-contained HTML page: nothing is fetched, no script runs, and every text is escaped.

The markup is in the macros of page.html. Charts are SVG within the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from hybrid.report.chart import Chart

Html = Markup
"""A plain string is text and gets escaped on its way here."""

_HERE = Path(__file__).parent


@cache
def _macros() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").module


def heading(level: int, title: str) -> Html:
    """A heading, level 1 to 6."""
    return Html(_macros().heading(level, title))


def paragraph(sentence: str) -> Html:
    """A paragraph of running text."""
    return Html(_macros().paragraph(sentence))


def note(sentence: str) -> Html:
    """A paragraph that stands out."""
    return Html(_macros().note(sentence))


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table whose first column names the row; an empty header leaves the head out."""
    return Html(_macros().table(caption, header, [(first, rest) for first, *rest in rows]))


def drawing(chart: Chart, alt: str, title: str = "") -> Html:
    """A chart within the page, with a title above it if there is one; `alt` says what it shows."""
    return Html(_macros().figure(_macros().drawing(Html(chart.svg()), chart.keys, alt), title))


def details(summary: str, text: str) -> Html:
    """A long text, which the page shows when it is asked for."""
    return Html(_macros().details(summary, text))


def row(parts: Iterable[Html]) -> Html:
    """Parts beside each other, as many as fit."""
    return Html(_macros().row([*parts]))


def page(title: str, parts: Iterable[Html]) -> bytes:
    """The whole document."""
    style = Html(_HERE.joinpath("page.css").read_text())
    document = _macros().page(title, [*parts], style).strip() + "\n"
    # a JSON file may hold half a surrogate pair, which no UTF-8 can
    return str(document).encode(errors="xmlcharrefreplace")
