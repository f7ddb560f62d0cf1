"""An HTML page that stands alone: no script, nothing fetched, every text escaped."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NewType

Html = NewType("Html", str)
"""Markup. A plain string is text and gets escaped on its way here."""

_STYLE = Path(__file__).with_name("page.css")


def text(value: object) -> Html:
    """Any value as text."""
    return Html(html.escape(str(value)))


def heading(level: int, title: str) -> Html:
    """A heading, level 1 to 6."""
    return Html(f"<h{level}>{text(title)}</h{level}>")


def paragraph(sentence: str) -> Html:
    """A paragraph of running text."""
    return Html(f"<p>{text(sentence)}</p>")


def note(sentence: str) -> Html:
    """A paragraph that stands out."""
    return Html(f'<p class="note">{text(sentence)}</p>')


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table whose first column names the row; an empty header leaves the head out."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in header)
    head = f"<thead><tr>{head}</tr></thead>" if header else ""
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{text(cell)}</td>" for cell in rest)
        body += f'<tr><th scope="row">{text(first)}</th>{cells}</tr>\n'
    above = f"<caption>{text(caption)}</caption>{head}"
    return Html(f"<table>{above}\n<tbody>\n{body}</tbody></table>\n")


def picture(png: bytes, alt: str, title: str = "") -> Html:
    """A PNG within the page, maybe below a title; `alt` says what it shows."""
    above = heading(3, title) if title else ""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return Html(f'<figure>{above}<img alt="{text(alt)}" src="{source}"></figure>\n')


def row(parts: Iterable[Html]) -> Html:
    """Parts beside each other, as many as fit."""
    return Html(f'<div class="row">\n{"".join(parts)}</div>\n')


def page(title: str, parts: Iterable[Html]) -> bytes:
    """The whole document; its policy forbids the browser to fetch or run anything."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    body = "\n".join(parts)
    document = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{_STYLE.read_text()}</style></head>\n"
        f"<body>\n{heading(1, title)}\n{body}</body></html>\n"
    )
    # a JSON file may hold half a surrogate pair, which no UTF-8 can
    return document.encode(errors="xmlcharrefreplace")
