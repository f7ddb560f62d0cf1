"""Small networks of many kinds, written as their users would."""

from __future__ import annotations

from time import sleep
from typing import Any

import torch
from torch import Tensor, nn


class Characters(nn.Module):
    """A causal Transformer that predicts each next character: (N, T) -> (N, T, V)."""

    def __init__(self, vocabulary: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        return self.head(self.encoder(x, mask=self.mask))


class Double(nn.Sequential):
    """Two convolutions, each with BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
        )


class UNet(nn.Module):
    """Three levels: (N, 1, H, W) -> (N, classes, H, W)."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = Double(1, width), Double(width, 2 * width)
        self.bottom = Double(2 * width, 4 * width)
        self.wider2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = Double(4 * width, 2 * width)
        self.wider1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up1 = Double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        x = self.bottom(nn.functional.max_pool2d(second, 2))
        x = self.up2(torch.cat([self.wider2(x), second], 1))
        x = self.up1(torch.cat([self.wider1(x), first], 1))
        return self.head(x)


class Masked(nn.Module):
    """Classes of sentences of many lengths: tokens and mask, integers (N, T) -> (N, classes)."""

    def __init__(self, vocabulary: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        there = mask.unsqueeze(-1)
        return self.head((x * there).sum(1) / there.sum(1))


class TwoHeads(nn.Module):
    """A class and a number from one trunk: (N, D) -> (N, classes), (N, 1)."""

    def __init__(self, inputs: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
        )
        self.kind, self.size = nn.Linear(width, classes), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.kind(x), self.size(x)


def mlp(inputs: int) -> nn.Module:
    """A number from a few: (N, inputs) -> (N,)."""
    layers = [nn.Linear(inputs, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1), nn.Flatten(0))


def signals(classes: int, width: int = 8) -> nn.Module:
    """Convolutions over time: (N, 1, T) -> (N, classes)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv1d(inputs, outputs, 5, stride=2, padding=2), nn.BatchNorm1d(outputs)]
        layers += [nn.ReLU(inplace=True)]
    pool = nn.AdaptiveAvgPool1d(1), nn.Flatten()
    return nn.Sequential(*layers, *pool, nn.Linear(2 * width, classes))


SECONDS = 0.001, 0.002
"""Of a sample in `Sleeping`: forward and backward."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(len(x) * SECONDS[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sleep(len(gradient) * SECONDS[1])
        return gradient


class Sleeping(nn.Linear):
    """A layer that takes its time, and none of the processor's."""

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(super().forward(x.flatten(1)))  # type: ignore[no-any-return, no-untyped-call]


def sleeping() -> nn.Sequential:
    """Two such layers for digits."""
    return nn.Sequential(Sleeping(64, 8), Sleeping(8, 10))
