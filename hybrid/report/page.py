"""A self-contained HTML page: nothing is fetched, and every text is escaped.

The markup is in the macros of page.html. Charts are data, which plotly's library, within the page,
draws. No other script may run: the page's content policy has the hashes of the two scripts.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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


def picture(png: bytes, alt: str, title: str = "") -> Html:
    """A PNG within the page, with a title above it if there is one; `alt` says what it shows."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return Html(_macros().figure(_macros().image(source, alt), title))


def drawing(figure: Figure, alt: str, title: str = "") -> Html:
    """A chart within the page, with a title above it if there is one; `alt` says what it shows."""
    from plotly.io.json import to_json_plotly

    # plotly's own JSON accepts half a surrogate pair; an unescaped "<" could end the element
    json = to_json_plotly(figure, engine="json").replace("<", "\\u003c")
    return Html(_macros().figure(_macros().drawing(Html(json), alt), title))


def row(parts: Iterable[Html]) -> Html:
    """Parts beside each other, as many as fit."""
    return Html(_macros().row([*parts]))


def page(title: str, parts: Iterable[Html]) -> bytes:
    """The whole document, with plotly's library (5 MB) if there is a chart in it."""
    shown = [*parts]
    scripts = []
    if any('class="chart"' in part for part in shown):
        from plotly.offline import get_plotlyjs

        scripts = [get_plotlyjs(), _HERE.joinpath("page.js").read_text()]
    hashes = " ".join(map(_hash, scripts))
    style = Html(_HERE.joinpath("page.css").read_text())
    document = _macros().page(title, shown, style, map(Html, scripts), Html(hashes)).strip() + "\n"
    # a JSON file may hold half a surrogate pair, which no UTF-8 can
    return str(document).encode(errors="xmlcharrefreplace")


def _hash(script: str) -> str:
    """The name of a script in a content policy."""
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"
