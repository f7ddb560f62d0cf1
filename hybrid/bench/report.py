"""The results of a bench: raw JSON, a Markdown table and a plot."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from hybrid.bench.measure import Runs, Speed, fastest
from hybrid.files import write_atomically


def machine() -> dict[str, Any]:
    """Where the figures were measured."""
    names = Path("/proc/cpuinfo")
    text = names.read_text() if names.is_file() else ""
    model = text.partition("model name")[2].partition("\n")[0].strip("\t :")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def speed_table(speeds: Sequence[Speed], base: Speed, epoch_images: int) -> str:
    """Markdown: one row for each speed, compared with `base`."""
    lines = [
        "| | images/s | epoch | speed-up (quartiles) | idle share | KB sent an image "
        "| working memory a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for speed in speeds:
        rate = median(speed.images_per_second)
        middle, low, high = speed.speed_up(base)
        shares = [median(rank) for rank in zip(*speed.idle_share, strict=True)]
        idle = " / ".join(f"{share:.0%}" for share in shares)
        peaks = [p for p in speed.working_bytes if p is not None]
        memory = f"{max(peaks) / 1e6:.0f} MB" if peaks else "-"
        lines.append(
            f"| {speed.name} | {rate:.1f} | {epoch_images / rate:.1f} s "
            f"| {middle:.2f} ({low:.2f}, {high:.2f}) | {idle} "
            f"| {speed.bytes_per_image / 1e3:.1f} | {memory} |"
        )
    return "\n".join(lines)


def accuracy_table(runs: Sequence[Runs], base: str, target: float) -> str:
    """Markdown: time to `target`, which a row's last run may reach, and every run."""
    there = {run.name: mean(run.seconds) for run in runs if run.spread()[0] >= target}
    lines = [
        f"| | epochs | test accuracy | seconds | time to {target:.2%} | over the base case |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        (value, spread), seconds = run.spread(), mean(run.seconds)
        time, gain = f"{seconds:.1f} s", f"{there.get(base, 0) / seconds:.2f}"
        lines.append(
            f"| {run.name} | {run.epochs} | {value:.2%} ± {spread:.2%} | {seconds:.1f} "
            f"| {time if value >= target else ''} "
            f"| {gain if value >= target and base in there else ''} |"
        )
    return "\n".join(lines)


def write(
    folder: Path,
    title: str,
    facts: dict[str, Any],
    speeds: Sequence[Speed],
    runs: Sequence[Runs],
) -> str:
    """Write bench.json, bench.md and, where matplotlib is there, bench.png; give the Markdown."""
    target = facts["target"]
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**facts, "speeds": [asdict(s) for s in speeds], "runs": [asdict(r) for r in runs]}
    base = fastest(speeds, facts["bases"])
    facts_line = _SENTENCE.format(**facts, places=", ".join(facts["cuts"]), base=base.name)
    text = [f"# {title}", "", facts_line, "", speed_table(speeds, base, facts["epoch_images"])]
    if target is not None:
        text += ["", accuracy_table(runs, base.name, target)]
    missing = dict(facts["left_out"])
    if find_spec("matplotlib") is None:
        missing["bench.png"] = "it needs matplotlib: pip install 'hybrid-blocks[report]'"
    else:
        plot(folder / "bench.png", title, speeds, base, runs, target)
    text += [f"\nLeft out: {name}: {why}." for name, why in missing.items()]
    text += ["\n![images a second and speed-up](bench.png)"] * ("bench.png" not in missing)
    markdown = "\n".join(text) + "\n"
    write_atomically(folder / "bench.json", (json.dumps(raw, indent=1) + "\n").encode())
    write_atomically(folder / "bench.md", markdown.encode())
    return markdown


def plot(
    file: Path,
    title: str,
    speeds: Sequence[Speed],
    base: Speed,
    runs: Sequence[Runs],
    target: float | None,
) -> None:
    """Bars of the speed-ups with quartiles; beside them accuracy over training time."""
    from matplotlib.figure import Figure

    panels = 2 if runs else 1
    figure = Figure(figsize=(7 * panels, 1.2 + 0.34 * len(speeds)), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    middle, low, high = torch.tensor([speed.speed_up(base) for speed in speeds]).T
    errors = torch.stack([middle - low, high - middle])
    axes[0].barh([speed.name for speed in speeds], middle, xerr=errors, color="#4878a8", capsize=2)
    axes[0].invert_yaxis()
    axes[0].axvline(1, color="#888888", linewidth=0.8)
    axes[0].set_xlabel(f"images/s over those of: {base.name}")
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        values, spreads = 100 * torch.tensor([r.spread() for r in own]).T
        seconds = [mean(r.seconds) for r in own]
        axes[1].errorbar(seconds, values, yerr=spreads, marker="o", capsize=2, label=name)
    if runs:
        axes[1].set_xlabel("seconds of training")
        axes[1].set_ylabel("final test accuracy, %")
        axes[1].legend(fontsize="small")
        if target is not None:
            axes[1].axhline(100 * target, color="#888888", linewidth=0.8)
    figure.savefig(file, dpi=120)


_SENTENCE = (
    "{ranks} ranks joined by {links} on {hosts} host(s), {threads} thread(s) a rank, "
    "{machine[processor]}, {machine[cores]} cores, torch {machine[torch]}; {model}, batch "
    "{batch_size}, {precision}, cut before {places}; {turns} interleaved turns of {steps} "
    "mini-batches. The base case is the fastest on one rank: {base}. Speed-ups are medians of "
    "ratios within a turn. `{command}`"
)
