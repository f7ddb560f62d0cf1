"""What a network that was trained on text writes after a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hybrid.training.restore import restore_text_model

START = b"\n"
"""What stands before a text that begins with nothing."""


def generate(
    run: str | Path,
    prompt: bytes = b"",
    *,
    temperature: float = 0.8,
    seed: int = 0,
    model: str | None = None,
    best: bool = False,
) -> Iterator[int]:
    """The bytes that follow a prompt, one by one without an end, from a run's newest checkpoint.

    Each is drawn from softmax(logits / temperature), given the `data.length` bytes before it at
    most; at temperature 0 it is the likeliest. The same seed gives the same text. `model` and
    `best` are as in `restore`. ValueError for a run on other data than text, and for a temperature
    below 0.
    """
    if not temperature >= 0:
        raise ValueError(f"--temperature is {temperature:g}: it must be 0 or above")
    length, network = restore_text_model(Path(run), model=model, best=best)
    network.eval()
    draws = torch.Generator().manual_seed(seed)
    read = torch.tensor([[*(prompt or START)]])
    while True:
        with torch.no_grad():
            logits = network(read[:, -length:])[0, :, -1].double()
        following = _drawn(logits, temperature, draws)
        yield int(following)
        read = torch.cat((read, following.view(1, 1)), dim=1)[:, -length:]


def _drawn(logits: Tensor, temperature: float, draws: torch.Generator) -> Tensor:
    """A class of softmax(logits / temperature), int64 (1,)."""
    if temperature == 0:
        return logits.argmax(0, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=draws)
