"""Figures agree: of a sentence with the page that it links, and of pages with each other.

A page's figure stands in one place, its page of benchmarks; whoever quotes it links that page in
the same sentence, and README and choosing.md quote nothing else. Where two pages measure the same
thing and differ, each of them links the other and says why.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
QUOTING = [
    ROOT / "README.md",
    *sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs/settings.md"}),
    BENCHMARKS / "README.md",
]
ANSWERING = [ROOT / "README.md", ROOT / "docs/choosing.md"]
WORDS = dict(
    zip(
        ("three", "four", "five", "six", "seven", "eight", "nine", "ten"), range(3, 11), strict=True
    )
)
WORDS |= {"eleven": 11, "twelve": 12, "sixteen": 16, "eighteen": 18, "twenty": 20}
LINK = re.compile(r"\]\(([^)\s#]*)(?:#[^)]*)?\)")
FIGURE = re.compile(r"(?<![\w.,/])(?<![A-Za-z]-)(?<!-\d-)\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d|/)")
"""A number that is no part of a name: ResNet-20, int8, gpt-8-256."""
RESULT = r"(?= ?%| points| times| k? ?images/s|\*\*| \|)"
"""What follows a figure that is a result, not a condition."""


def figures(text: str, result: str = "") -> list[str]:
    """The numbers of a text without its code and addresses, those in words as digits."""
    text = re.sub(r"`[^`]*`", " ", LINK.sub(" ", text)).replace(" ± ", " | ")
    text = re.sub(
        rf"\b(?:{'|'.join(WORDS)})\b", lambda x: str(WORDS[x[0].lower()]), text, flags=re.IGNORECASE
    )
    return [x.replace(",", "") for x in re.findall(FIGURE.pattern + result, text)]


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, items of lists, and tables with the paragraph before them; no code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\n\n(?=\|)", "\n", text)
    for piece in re.split(r"\n\s*\n|\n(?=\s*(?:- |#|\d+\. ))", text):
        if not re.match(r"    (?!- |\d+\. )\S", piece):
            yield piece


def sentences(text: str) -> Iterator[str]:
    """Sentences, and rows of tables."""
    for piece in paragraphs(text):
        for part in re.split(r"\n(?=\|)", piece):
            yield from re.split(r"(?<=[.:;!?])\s+(?=[A-Z*\[`(])", " ".join(part.split()))


def linked(page: Path, text: str) -> list[Path]:
    """The pages of measurements that a text links."""
    targets = {(page.parent / target).resolve() for target in LINK.findall(text) if target}
    known = {*BENCHMARKS.rglob("*.md"), ROOT / "docs/gpu.md"} - {page}
    return sorted(targets & known)


def strangers(page: Path, text: str, result: str = "") -> list[tuple[str, str]]:
    """Figures that are on none of the pages that a text links, rounded to as many digits."""
    known = {x for other in linked(page, text) for x in figures(other.read_text())}
    return [
        (figure, " ".join(text.split()))
        for figure in figures(text, result)
        if not any(f"{float(other):.{len(figure.partition('.')[2])}f}" == figure for other in known)
    ]


def misquoted(page: Path, text: str) -> list[tuple[str, str]]:
    return [
        fault
        for sentence in sentences(text)
        if linked(page, sentence)
        for fault in strangers(page, sentence)
    ]


def unsupported(page: Path, text: str) -> list[tuple[str, str]]:
    return [x for piece in paragraphs(text) for x in strangers(page, piece, RESULT)]


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_is_on_the_page_that_is_linked_in_its_sentence(page):
    assert not misquoted(page, page.read_text())


@pytest.mark.parametrize("page", ANSWERING, ids=lambda page: page.name)
def test_every_result_that_is_quoted_has_a_link_to_its_page(page):
    assert not unsupported(page, page.read_text())


PAGE = "docs/benchmarks/replicas/grids.md"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (f"Replicas [win]({PAGE}) in ten of twelve.", []),
        (f"Replicas [win]({PAGE}) in eleven of twelve.", ["11"]),
        (f"ResNet-20 [has]({PAGE}) 1,515 images/s with `m=77`.", []),
        (f"ResNet-20 [has]({PAGE}) 1,516 images/s.", ["1516"]),
        (f"It is first [by 7 %]({PAGE}) and 12.9 %.", ["12.9"]),
        (f"| [Grids]({PAGE}) win | 17 of 12 |", ["17"]),
    ],
)
def test_a_wrong_figure_is_found(text, wrong):
    assert [figure for figure, _ in misquoted(ROOT / "README.md", text)] == wrong


def test_a_result_without_a_link_is_found():
    text = f"It is 1.7 times as fast in 3 epochs.\n\nIt is [7 %]({PAGE}) ahead.\n"
    assert [figure for figure, _ in unsupported(ROOT / "README.md", text)] == ["1.7"]


# What raw files measure: (network, ranks, link, batch, row) -> speed-up over one rank.

Key = tuple[str, int, str, int, str]
SIMULATED = {"data parallel": "replicas, float32", "replicas": "replicas, float32"}


def bench(file: Path) -> Iterator[tuple[Key, float]]:
    """A file of `hybrid bench`; the rate of the link is in its name."""
    raw = json.loads(file.read_text())
    rate = re.search(r"(\d+)-?([mg])", file.stem)
    link = f"{rate[1]} {rate[2].upper()}b/s" if raw["hosts"] > 1 else "shared memory"
    rates = {row["name"]: median(row["images_per_second"]) for row in raw["speeds"]}
    for name, value in rates.items():
        key = raw["model"], raw["ranks"], link, raw["batch_size"], name
        yield key, value / rates["plain loop"]


def simulated(file: Path) -> Iterator[tuple[Key, float]]:
    """A file by "network, K=2, 10 Mb/s"; of its rows those that all of these files have."""
    batch = {"gpt-8-256": 32}
    for case, rows in json.loads(file.read_text()).items():
        network, K, link, *parts = case.split(", ")
        for name, row in rows.items():
            if SIMULATED.get(name, name) == "replicas, float32" and not parts:
                value = row["speed_up"] if isinstance(row, dict) else row
                key = network, int(K[2:]), link, batch.get(network, 128), "simulated replicas"
                yield key, value


def virtual(file: Path) -> Iterator[tuple[Key, float]]:
    """A file of the virtual clock: rates by "network, 8 replicas, 1 Gb/s"."""
    raw = json.loads(file.read_text())
    for case, rates in raw.items():
        if found := re.fullmatch(r"([\w-]+), (\d+) replicas, ([\d.]+ Gb/s)", case):
            link = "100 Mb/s" if found[3] == "0.1 Gb/s" else found[3]
            # mini-batches have other sizes there, which is a reason to be told
            batch = 32 if found[1].startswith("gpt") else 128
            key = found[1], int(found[2]), link, batch, "simulated replicas"
            yield key, mean(rates) / mean(raw[f"{found[1]}, serial"])


def measured() -> dict[Key, list[tuple[Path, float]]]:
    """By what is measured: the raw files and their values."""
    readers = {BENCHMARKS / "slow_links.json": simulated, BENCHMARKS / "filled_map.json": simulated}
    readers |= dict.fromkeys(BENCHMARKS.glob("virtual_rates*.json"), virtual)
    folders = ("two-ranks", "no-bubble", "replicas")
    readers |= {x: bench for name in folders for x in BENCHMARKS.glob(f"{name}/*.json")}
    found = defaultdict(list)
    for file, read in readers.items():
        for key, value in read(file):
            found[key].append((file, value))
    return found


def pages_of(file: Path) -> set[Path]:
    """The pages that link a raw file."""
    return {page for page in BENCHMARKS.rglob("*.md") if f"{file.name})" in page.read_text()}


def parted(found: dict[Key, list[tuple[Path, float]]]) -> list[tuple[Key, float, float]]:
    """What two pages have figures of that differ by a quarter, and do not link each other for."""
    faults = []
    for key, values in found.items():
        for (one, a), (other, b) in combinations(values, 2):
            if max(a, b) > 1.25 * min(a, b):
                here, there = pages_of(one), pages_of(other)
                tell = any(
                    x == y or (y in linked(x, x.read_text()) and x in linked(y, y.read_text()))
                    for x in here
                    for y in there
                )
                if not tell:
                    faults.append((key, a, b))
    return faults


def test_pages_whose_figures_of_the_same_thing_differ_link_each_other():
    found = measured()
    assert sum(len(values) > 1 for values in found.values()) > 20
    assert not parted(found)


def test_pages_that_differ_and_do_not_say_so_are_found():
    files = BENCHMARKS / "rl.json", BENCHMARKS / "filled_map.json"
    key = ("resnet20", 2, "1 Gb/s", 128, "row")
    assert parted({key: [(files[0], 1.0), (files[1], 1.3)]}) == [(key, 1.0, 1.3)]
    assert not parted({key: [(files[0], 1.0), (files[1], 1.2)]})
