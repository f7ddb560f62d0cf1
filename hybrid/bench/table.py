"""The results of a bench: raw JSON and a Markdown table."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hybrid.bench.measure import Speed, fastest
from hybrid.files import write_atomically


def machine() -> dict[str, Any]:
    """Describe the machine of the measurement."""
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
    """Write a Markdown table with a row for each speed, compared with `base`."""
    lines = [
        "| | samples/s | epoch | speed-up (quartiles) | idle share | KB sent / sample |",
        "|---|---|---|---|---|---|",
    ]
    for speed in speeds:
        rate = median(speed.images_per_second)
        middle, low, high = speed.speed_up(base)
        shares = [median(rank) for rank in zip(*speed.idle_share, strict=True)]
        idle = " / ".join(f"{share:.0%}" for share in shares)
        lines.append(
            f"| {speed.name} | {rate:.1f} | {epoch_images / rate:.1f} s "
            f"| {middle:.2f} ({low:.2f}, {high:.2f}) | {idle} "
            f"| {speed.bytes_per_image / 1e3:.1f} |"
        )
    return "\n".join(lines)


def write(folder: Path, facts: dict[str, Any], speeds: Sequence[Speed]) -> str:
    """Write bench.json and bench.md, and return the Markdown."""
    base = fastest(speeds, facts["bases"])
    text = [
        "# {model} on {data}, {ranks} ranks\n".format(**facts),
        _SENTENCE.format(**facts, places=", ".join(facts["cuts"]), base=base.name) + "\n",
        speed_table(speeds, base, facts["epoch_images"]),
        *(f"\nLeft out: {name}: {why}." for name, why in facts["left_out"].items()),
    ]
    markdown = "\n".join(text) + "\n"
    raw = {**facts, "speeds": [asdict(s) for s in speeds]}
    write_atomically(folder / "bench.json", (json.dumps(raw, indent=1) + "\n").encode())
    write_atomically(folder / "bench.md", markdown.encode())
    return markdown


_SENTENCE = (
    "{ranks} ranks joined by {links} on {hosts} host(s), {threads} thread(s) a rank, "
    "{machine[processor]}, {machine[cores]} cores, torch {machine[torch]}; {model}, batch "
    "{batch_size}, {precision}, cut before {places}; {turns} interleaved turns of {steps} "
    "mini-batches. The base case is the fastest on one rank: {base}. Speed-ups are medians of "
    "ratios within a turn. `{command}`"
)
