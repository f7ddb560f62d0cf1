"""Processor time of a pass over cuts that several tensors cross, beside the undivided network.

    python docs/benchmarks/crossing.py [--turns 20]

Forward and backward passes of a micro-batch through the blocks of a network, in one process and one
thread, as the ranks of a pipeline make them: what leaves a block is the next one's leaf. A U-Net of
64 pixels whose skip connections cross the cuts, transformers' GPT-2 (4 layers, width 128, texts of
64 tokens with a mask) and ResNet-20 cut inside its residual blocks. Undivided and divided passes
take turns. A message's cost is the difference of the two over the cuts: copies, the code before a
cut that is run again without numbers, and leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles
from time import thread_time
from typing import Any

import measuring
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid import split
from hybrid.networks import models
from hybrid.solvers.layers.bundle import call_network


class UNet(nn.Module):
    """Images (N, 3, 64, 64) to (N, 3, 64, 64), with a skip connection at each of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        widths = 16, 32, 64
        self.down = nn.ModuleList(conv(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = conv(64, 64)
        self.up = nn.ModuleList(conv(2 * w, w // 2) for w in reversed(widths))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat([x, skips.pop()], 1))
        out: Tensor = self.head(x)
        return out


def conv(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())


def gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    config.tie_word_embeddings = False
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    return GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def networks() -> dict[str, tuple[nn.Module, Any, list[str]]]:
    """Network, a micro-batch, cuts."""
    image = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    resnet = models.resnet(20)
    inside = [f"layer{i}.1.conv2" for i in (1, 2, 3)]
    last = torch.channels_last
    unet = UNet().to(memory_format=last), image.contiguous(memory_format=last)
    return {
        "U-Net": (*unet, ["down.1", "middle", "up.1"]),
        "GPT-2": (*gpt2(), [f"transformer.h.{i}" for i in (1, 2, 3)]),
        "ResNet-20, inside blocks": (resnet.to(memory_format=last), resnet.sample(16), inside),
    }


def undivided(network: nn.Module, inputs: Any) -> Callable[[], None]:
    def go() -> None:
        _backward(call_network(network, inputs), None)

    return go


def divided(modules: Sequence[nn.Module], inputs: Tensor) -> Callable[[], None]:
    def go() -> None:
        value: Any = inputs
        passes = []
        for i, module in enumerate(modules):
            leaf = tree_map(lambda x, cut=i > 0: x.detach().requires_grad_(cut), value)
            value = module(leaf, apart=True)
            passes.append((leaf, value))
        p: Any = None
        for leaf, out in reversed(passes):
            _backward(out, p)
            p = tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, leaf)

    return go


def _backward(out: Any, p: Any) -> None:
    ends = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    adjoints = [torch.ones_like(x) for x in ends]
    if p is not None:
        both = zip(tree_leaves(out), tree_leaves(p), strict=True)
        adjoints = [y for x, y in both if x.requires_grad]
    torch.autograd.backward(ends, adjoints)


def main() -> None:
    options = measuring.options(__doc__, turns=20)
    torch.set_num_threads(1)
    rows = []
    for name, (network, inputs, cuts) in networks().items():
        blocks = split(network, cuts=cuts, sample=inputs).with_bundles(inputs)
        modules = [blocks.module(k) for k in range(len(blocks))]
        works = {
            "undivided": undivided(network, inputs),
            "divided": divided(modules, blocks.pack_inputs(inputs)),
        }
        times: dict[str, list[float]] = {kind: [] for kind in works}
        for turn in range(options.turns + 3):
            for kind, work in works.items():
                begun = thread_time()
                work()
                if turn >= 3:
                    times[kind].append(1e3 * (thread_time() - begun))
        pairs = zip(times["divided"], times["undivided"], strict=True)
        more = quantiles((1e3 * (a - b) / len(cuts) for a, b in pairs), n=4)
        whole, parts = (quantiles(each, n=4)[1] for each in (times["undivided"], times["divided"]))
        message = f"{more[1]:.0f} ({more[0]:.0f}-{more[2]:.0f})"
        rows.append((name, f"{whole:.1f}", f"{parts:.1f}", message))
    measuring.show(" | undivided, ms | divided, ms | us for each cut (quartiles)", rows)


if __name__ == "__main__":
    main()
