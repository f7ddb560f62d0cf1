"""What the measurements of this folder share: options, rows, turns, raw figures and tables."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from hybrid import Trainer, split
from hybrid.files import write_atomically
from hybrid.networks import models
from hybrid.solvers import Solver

Row = TypeVar("Row")
DATA = Path("data")
GRID = {"data_dir": DATA, "seeds": [0, 1], "rows": "", "part": "0/1", "only_collect": False}
"""Options of a script that trains rows with seeds: see `chosen`."""


def options(doc: str | None, **flags: Any) -> Namespace:
    """The command line: each flag and its default, which has its type.

    A choice of names is an argument, any number of them under a plural. A list takes several
    values, an empty one a value each time it is given; False is a switch and None a text.
    """
    text = (doc or "").replace("%", "%%")
    parser = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    for name, default in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, (tuple, dict)) and name.endswith("s"):
            parser.add_argument(name, nargs="*", choices=[*default, []])
        elif isinstance(default, (tuple, dict)):
            parser.add_argument(name, choices=[*default])
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif default == []:
            parser.add_argument(flag, action="append", default=[])
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default)
    return parser.parse_args()


def chosen(rows: Iterable[tuple[str, Row]], options: Namespace) -> Iterator[tuple[str, Row]]:
    """The rows with the text of --rows in their names, every n-th from the i-th for --part i/n."""
    part, parts = map(int, options.part.split("/"))
    for number, (title, row) in enumerate(rows):
        if number % parts == part and options.rows in title:
            yield title, row


class Raw:
    """A JSON file of figures beside its script; what it holds is not measured again."""

    def __init__(self, script: str, suffix: str = "") -> None:
        self.file = Path(script).with_name(f"{Path(script).stem}{suffix}.json")

    def read(self) -> dict[str, Any]:
        """All figures."""
        return dict(json.loads(self.file.read_text())) if self.file.exists() else {}

    def get(self, *keys: str) -> Any:
        """The figure at a path of keys; an empty table without one."""
        value: Any = self.read()
        for key in keys:
            value = value.get(key, {})
        return value

    def keep(self, *keys: str, value: Any) -> None:
        """Add a figure; several processes may add to one file in turn."""
        *path, last = keys
        whole = table = self.read()
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
        self.write(whole)

    def write(self, figures: Any) -> None:
        """Replace all figures."""
        write_atomically(self.file, json.dumps(figures, indent=1) + "\n")


def in_turns(works: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of each work, which take turns, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in [*works.items()][:: 1 if turn % 2 else -1]:
            begun = perf_counter()
            work()
            if turn:
                seconds[name].append(perf_counter() - begun)
    return seconds


def ratios(
    values: Sequence[float], base: Sequence[float], digits: int = 3
) -> tuple[float, float, float]:
    """Median and quartiles of the ratios of values that were measured in the same turn."""
    each = sorted(a / b for a, b in zip(values, base, strict=True))
    quarter = len(each) // 4
    low, high = each[quarter], each[len(each) - 1 - quarter]
    return round(median(each), digits), round(low, digits), round(high, digits)


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The mean and, of several, the standard deviation."""
    deviation = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{deviation}"


def extremes(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the least and the greatest."""
    return f"{median(values):{form}} ({min(values):{form}}, {max(values):{form}})"


def show(header: str, rows: Iterable[Sequence[object]]) -> None:
    """Print a table in Markdown; the header has its cells between bars."""
    print(f"| {header} |\n|{'---|' * (header.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def resnet(name: str, seed: int = 0) -> nn.Sequential:
    """A network for CIFAR-10 with the weights of a seed."""
    torch.manual_seed(seed)
    return models.build(name, 10, 3, 32)


def on_virtual_links(
    network: nn.Module,
    blocks: int,
    solver: Solver,
    *,
    train: Mapping[str, Any],
    gigabits: float = 10.0,
    **more: Any,
) -> Trainer:
    """A trainer on the virtual clock, with one thread a rank."""
    return Trainer(
        split(network, blocks, inside=solver.cuts_inside),
        solver,
        train={"threads": 1, **train},
        links={"kind": "virtual", "gigabits_per_second": gigabits},
        **{"quiet": True, **more},
    )


def of_summary(folder: Path, keys: str = "") -> dict[str, Any] | None:
    """What is kept of a run that has ended; None of any other."""
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    names = keys or "test_accuracy images_per_second idle_share bytes_sent"
    kept = {} if keys else {"seconds": summary["train_seconds"]}
    return kept | {name: summary[name] for name in names.split()}


def curve(metrics: Path) -> list[tuple[int, float]]:
    """(epoch, test accuracy) at every test, of a run that goes on, too."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["epoch"], line["test_accuracy"]) for line in lines if line["phase"] == "test"]


def slug(title: str, seed: int) -> str:
    """The name of a run folder."""
    return f"{title}, seed {seed}".replace(", ", "_").replace(" ", "-").replace("/", "-of-")
