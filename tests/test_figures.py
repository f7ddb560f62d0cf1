"""Figures agree: a sentence with the page that it links, and pages with each other."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [
    ROOT / "README.md",
    *sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs/settings.md"}),
    BENCHMARKS / "README.md",
]
WORDS = dict(zip("three four five six seven eight nine ten eleven twelve".split(), range(3, 13)))
LINK = re.compile(r"\]\(([^)\s#]*)(?:#[^)]*)?\)")
FIGURE = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d|/)")
"""A number that is no part of a name (ResNet-20, int8, gpt-8-256, (1, 2)...)."""


def plain(text: str) -> str:
    """Without code, names of links and tables' bars; words of numbers as numbers."""
    text = re.sub(r"`[^`]*`", " ", LINK.sub(" ", text))
    return re.sub(
        rf"\b({'|'.join(WORDS)})\b", lambda word: str(WORDS[word[0].lower()]), text, flags=re.I
    )


def figures(text: str) -> list[str]:
    return [figure.replace(",", "").rstrip(",") for figure in FIGURE.findall(plain(text))]


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose, and rows of tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for piece in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\.) ?)", text):
        if not re.match(r"    \S", piece):
            yield from re.split(r"(?<=[.:;!?])\s+(?=[A-Z*\[`(])", " ".join(piece.split()))


def linked(page: Path, sentence: str) -> list[Path]:
    """The pages of benchmarks that a sentence links."""
    targets = [(page.parent / target).resolve() for target in LINK.findall(sentence) if target]
    return [x for x in targets if x.suffix == ".md" and BENCHMARKS in x.parents and x.exists()]


def agrees(figure: str, known: set[str]) -> bool:
    """A figure of a page, rounded to these digits."""
    digits = len(figure.partition(".")[2])
    return figure in known or any(f"{float(other):.{digits}f}" == figure for other in known)


def strangers(page: Path, text: str) -> Iterator[tuple[str, str]]:
    """Figures that no page has that is linked beside them."""
    for sentence in sentences(text):
        if pages := linked(page, sentence):
            known = {figure for x in pages for figure in figures(x.read_text())}
            for figure in figures(sentence):
                if not agrees(figure, known):
                    yield figure, sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_stands_on_the_page_that_is_linked_beside_it(page):
    assert not [*strangers(page, page.read_text())]
