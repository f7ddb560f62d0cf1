"""One gradient boundary at mid-depth in the fine-tuning of a GPT, following LoPT (2605.04913).

    python docs/benchmarks/post_training.py [--seeds 0 1]

gpt-8-64 trains on Python's library (1,000 steps of 32 texts of 128 bytes, AdamW), then on English
text, pydoc's topics (200 steps), at the better of two rates. The second half has the task's loss,
whose gradient stops at the boundary. The first half:

    whole            no boundary
    frozen           does not train
    linear head      predicts the next byte by a linear layer, as `local-updates` does
    reconstruction   a linear layer of its output predicts its input, the embedded bytes

Held-out bits a byte of the new text, and of the old one. Rows that the JSON holds are not repeated.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import measuring
import torch
from torch import Tensor, nn

from hybrid.networks import models

RAW = measuring.Raw(__file__)
LENGTH, TEXTS, PRETRAINING, STEPS = 128, 32, 1000, 200
RATES = 3e-4, 1e-3
FIRST_HALVES = "whole", "frozen", "linear head", "reconstruction"
LN2 = 0.6931471805599453


def corpora() -> dict[str, Tensor]:
    """Bytes of Python's library and of pydoc's topics, (n,), uint8."""
    library = Path(sysconfig.get_path("stdlib"))
    python = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    english = (library / "pydoc_data" / "topics.py").read_bytes().replace(b"\\n", b"\n")
    texts = {"old": python, "new": english}
    return {
        name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in texts.items()
    }


class Windows:
    """Texts (N, 128) and their next bytes; the last tenth is held out."""

    def __init__(self, text: Tensor, seed: int) -> None:
        cut = len(text) * 9 // 10
        self.train, self.held_out = text[:cut], text[cut:]
        self.draw = torch.Generator().manual_seed(seed)

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(steps):
            starts = torch.randint(len(self.train) - LENGTH - 1, (TEXTS,), generator=self.draw)
            yield self.at(self.train, starts)

    def tested(self) -> list[tuple[Tensor, Tensor]]:
        starts = torch.linspace(0, len(self.held_out) - LENGTH - 1, 256).long()
        return [self.at(self.held_out, some) for some in starts.split(64)]

    @staticmethod
    def at(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def halves(network: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Embedding, the first half of the layers, and the rest."""
    parts = dict(network.named_children())
    layers = [*parts["layers"].children()]
    middle = len(layers) // 2
    rest = parts["norm"], parts["output"], parts["by_class"]
    first = nn.Sequential(*layers[:middle])
    return parts["embedding"], first, nn.Sequential(*layers[middle:], *rest)


def bits(network: nn.Module, windows: Windows) -> float:
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(network(x), y).item() for x, y in windows.tested()]
    return mean(losses) / LN2


def optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)


def pretrained(windows: Windows) -> nn.Module:
    network = models.gpt(8, 64, 256, LENGTH)
    steps = optimizer(network.parameters(), 2e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(steps, 2e-3, PRETRAINING, cycle_momentum=False)
    for x, y in windows.batches(PRETRAINING):
        nn.functional.cross_entropy(network(x), y).backward()
        steps.step()
        steps.zero_grad()
        rate.step()
    return network


def tuned(network: nn.Module, kind: str, rate: float, windows: Windows) -> nn.Module:
    """The network after its fine-tuning."""
    network = copy.deepcopy(network)
    embedding, first, second = halves(network)
    head = nn.Linear(64, 256 if kind == "linear head" else 64)
    lower = [*embedding.parameters(), *first.parameters()]
    if kind == "frozen":
        for p in lower:
            p.requires_grad_(False)
    trained = [p for p in network.parameters() if p.requires_grad]
    steps = optimizer([*trained, *head.parameters()], rate)
    for x, y in windows.batches(STEPS):
        h = embedding(x)
        z = first(h)
        crossing = z if kind == "whole" else z.detach()
        loss = nn.functional.cross_entropy(second(crossing), y)
        if kind == "linear head":
            loss = loss + nn.functional.cross_entropy(head(z).transpose(1, 2), y)
        elif kind == "reconstruction":
            loss = loss + nn.functional.mse_loss(head(z), h.detach())
        loss.backward()
        steps.step()
        steps.zero_grad()
    return network


def main() -> None:
    options = measuring.options(__doc__, seeds=[0])
    torch.set_num_threads(1)
    for seed in options.seeds:
        torch.manual_seed(seed)
        windows = {name: Windows(text, seed) for name, text in corpora().items()}
        network: nn.Module | None = None
        for kind in FIRST_HALVES:
            for rate in RATES:
                keys = kind, str(rate), str(seed)
                if RAW.get(*keys):
                    continue
                if network is None:
                    network = pretrained(windows["old"])
                    before = {name: bits(network, w) for name, w in windows.items()}
                    RAW.keep("before", "", str(seed), value=before)
                new = tuned(network, kind, rate, Windows(corpora()["new"], seed))
                value = {name: bits(new, w) for name, w in windows.items()}
                RAW.keep(*keys, value=value)
                print(*keys, value, flush=True)
    rows = RAW.read()
    best = {
        kind: min(by.values(), key=lambda seeds: mean(s["new"] for s in seeds.values()))
        for kind, by in rows.items()
    }
    measuring.show(
        "first half | bits a byte, new text | old text",
        (
            (kind, *(measuring.spread([s[t] for s in by.values()], ".3f") for t in ("new", "old")))
            for kind, by in best.items()
        ),
    )


if __name__ == "__main__":
    main()
