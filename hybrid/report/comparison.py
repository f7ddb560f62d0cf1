"""The comparison of several runs: runs that differ only in their seed share a row and a curve."""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from hybrid.report.curves import COMPARED, Group, curves
from hybrid.report.page import UNKNOWN, Html, amount, drawing, heading, note, page, row, table
from hybrid.report.records import RunRecord, subject

SEED, LINKS = "train.seed", "links.kind"
_SUBJECT = ("solver.name", "model.name", "data.name")
"""Settings that are shown by value alone."""
_IGNORED = (SEED, "data.dir")
"""Settings in which runs of one row may differ."""
_MOST_NAMED = 3
"""The most other settings in the name of a group; the table of differences has all."""


def content(records: Sequence[RunRecord]) -> bytes:
    """Make the page."""
    flat = [_flat(record) for record in records]
    keys = sorted({key for settings in flat for key in settings}.difference(_IGNORED))
    differ = [key for key in keys if len({repr(s.get(key)) for s in flat}) > 1]
    common = {key.partition(".")[0]: flat[0].get(key) for key in _SUBJECT if key not in differ}
    title = ": ".join(filter(None, [f"{len(records)} runs compared", subject(common)]))
    groups = _groups(records, flat, differ)
    charts = [drawing(chart, name) for name, chart in curves(COMPARED, groups)]
    parts = [_overview(groups), _settings(groups, differ), heading("Curves"), row(charts)]
    return page(title, parts)


def _flat(record: RunRecord) -> dict[str, Any]:
    """Return settings by "section.key"; those of a library run come from its summary.

    links.kind is the kind actually used, because `auto` depends on the launcher.
    """
    summary = record.summary
    flat: dict[str, Any] = {
        "model.name": summary.model,
        "data.name": summary.data,
        "solver.name": summary.solver,
    }
    flat |= {"split.blocks": summary.blocks, "train.epochs": summary.epochs}
    if record.settings is not None:
        tree = record.settings.model_dump()
        flat = {f"{part}.{key}": v for part, table in tree.items() for key, v in table.items()}
    return flat if summary.links is None else flat | {LINKS: summary.links}


def _groups(
    records: Sequence[RunRecord], flat: Sequence[dict[str, Any]], differ: Sequence[str]
) -> list[Group]:
    """Group runs with equal settings, named by differing settings and by folders."""
    names = [record.run.resolve().name for record in records]
    if len({*names}) < len(names):
        names = [str(record.run) for record in records]
    numbers: dict[tuple[str, ...], list[int]] = {}
    for i, settings in enumerate(flat):
        numbers.setdefault(tuple(repr(settings.get(key)) for key in differ), []).append(i)
    groups = []
    for members in numbers.values():
        settings = flat[members[0]]
        labels = [_label(key, settings[key]) for key in _naming_keys(settings, flat, differ)]
        folders = ", ".join(names[i] for i in members[:2])
        if len(members) > 2:
            folders = f"{names[members[0]]} and {len(members) - 1} more"
        label = f"{', '.join(labels)} ({folders})" if labels else folders
        groups.append(Group(label, [records[i] for i in members]))
    return groups


def _naming_keys(
    settings: Mapping[str, Any], flat: Sequence[Mapping[str, Any]], differ: Sequence[str]
) -> list[str]:
    """Choose the keys that name a group: its subject, then settings among runs of this subject."""
    subjects = [key for key in _SUBJECT if key in differ and key in settings]
    same = [o for o in flat if all(o.get(key) == settings[key] for key in subjects)]
    others = []
    for key in settings.keys() & {*differ}.difference(_SUBJECT):
        values = [other[key] for other in same if key in other]
        lists = any(isinstance(value, (list, tuple, dict)) for value in values)  # of any length
        if not lists and len({*map(repr, values)}) > 1:
            others.append(key)
    return subjects + sorted(others, key=lambda key: (key == LINKS, key))[:_MOST_NAMED]


def _label(key: str, value: object) -> str:
    section, _, name = key.partition(".")
    if key in (*_SUBJECT, LINKS):
        return str(value)
    return f"{section if name == 'name' else name} {_shown(value)}"


def _shown(value: object) -> str:
    if value in (None, "", (), [], {}):
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _overview(groups: Sequence[Group]) -> Html:
    result = ("epochs", "test accuracy", "test loss")
    header = ("", "runs", *result, "training", "samples/s", "idle, most", "peak memory")
    rows = [
        (
            group.label,
            str(len(group.records)),
            _epochs(group),
            _spread(group, "test_accuracy", ".2f", "%", 100),
            _spread(group, "test_loss", ".3g"),
            _spread(group, "train_seconds", ".1f", group.records[0].time_unit),
            _spread(group, "images_per_second", ",.0f"),
            _spread(group, "idle_share", ".1f", "%", 100),
            amount(max(_values(group, "peak_memory_bytes"), default=None)),
        )
        for group in groups
    ]
    return table("Runs", header, rows)


def _epochs(group: Group) -> str:
    """Format the last tested epochs of a group's runs, which early stopping may make differ."""
    tested = [[x.epoch for x in record.lines if x.phase == "test"] for record in group.records]
    return " and ".join(map(str, sorted({epochs[-1] for epochs in tested if epochs}))) or UNKNOWN


def _values(group: Group, name: str) -> list[float]:
    """Collect a number from the summaries of runs that have it; the largest of a list."""
    values = [record.summary[name] for record in group.records]
    return [float(max(x) if isinstance(x, list) else x) for x in values if x not in (None, [])]


def _spread(group: Group, name: str, form: str, unit: str = "", scale: float = 1.0) -> str:
    """Format the mean of a group's runs and, for several runs, the standard deviation."""
    values = [scale * value for value in _values(group, name)]
    if not values:
        return UNKNOWN
    several = len(values) > 1 and all(abs(value) < 1e100 for value in values)
    shown = [sum(values) / len(values), *([stdev(values)] if several else [])]
    # no break within a cell
    return f"{' ± '.join(format(x, form) for x in shown)} {unit}".strip().replace(" ", "\u00a0")


def _settings(groups: Sequence[Group], differ: Sequence[str]) -> Html:
    """Make a table of the settings that differ between groups, except those of one method only."""
    if not differ:
        return note("The runs have the same settings, but for their seeds.")
    flat = [_flat(group.records[0]) for group in groups]
    common = [key for key in differ if len({repr(s[key]) for s in flat if key in s}) > 1]
    rows = [(key, *(_shown(settings.get(key, UNKNOWN)) for settings in flat)) for key in common]
    return table("What differs", ("", *(group.label for group in groups)), rows)
