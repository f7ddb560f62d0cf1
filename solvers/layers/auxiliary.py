"""Networks that generate the tensor at a cut from a network's input."""

from __future__ import annotations

from math import log2, prod

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

Shape = tuple[int, ...]
HASHED = 4096
"""Rows of the table in which token indices are looked up, by their remainder."""


def auxiliary_network(
    shape: Shape, cut: Shape, width: int, depth: int, seed: int, indices: bool = False
) -> nn.Sequential:
    """a_k from an input to the tensor at a cut; both shapes are a sample's.

    For images (C, H, W) it has convolutions, BatchNorm and ReLU, first with stride 2 until the size
    fits; the rest is averaged. For tokens (T, C), or their `indices` (T,), the layers work on each
    token. Vectors, and anything else after flattening, go through linear layers. The weights are a
    function of `seed` only.
    """
    if len(shape) == 3 and len(cut) <= 3:
        layers = _of_images(shape, cut, width, depth)
    elif indices and len(shape) == 1:
        table = skip_init(nn.Embedding, HASHED, width)
        layers = [table, *_of_tokens((*shape, width), cut, width, depth)]
    elif len(shape) == 2 and not indices:
        layers = _of_tokens(shape, cut, width, depth)
    else:
        layers = [nn.Flatten(), *_of_vectors(prod(shape), prod(cut), width, depth)]
        layers.append(nn.Unflatten(1, cut))
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, generator=generator)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def _of_images(image: Shape, cut: Shape, width: int, depth: int) -> list[nn.Module]:
    size = cut[1] if len(cut) == 3 else 1
    halvings = max(0, round(log2(image[1] / size))) if len(cut) == 3 else 2
    layers: list[nn.Module] = []
    channels = image[0]
    for number in range(max(depth, halvings)):
        stride = 2 if number < halvings else 1
        layers += [
            skip_init(nn.Conv2d, channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    if len(cut) == 2:
        tokens, features = cut
        project = skip_init(nn.Conv2d, channels, features, 1)
        return [*layers, project, nn.Flatten(2), nn.AdaptiveAvgPool1d(tokens), _Transposed()]
    layers.append(nn.AdaptiveAvgPool2d(cut[1:] if len(cut) == 3 else 1))
    layers.append(skip_init(nn.Conv2d, channels, cut[0], 1))
    return [*layers, nn.Flatten()] if len(cut) == 1 else layers


def _of_tokens(shape: Shape, cut: Shape, width: int, depth: int) -> list[nn.Module]:
    tokens, features = shape
    if len(cut) == 2:
        layers = _of_vectors(features, cut[1], width, depth)
        if cut[0] != tokens:
            layers += [_Transposed(), nn.AdaptiveAvgPool1d(cut[0]), _Transposed()]
        return layers
    layers = _of_vectors(features, prod(cut), width, depth)
    return [*layers, _Transposed(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Unflatten(1, cut)]


def _of_vectors(features: int, out: int, width: int, depth: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [skip_init(nn.Linear, features, width), nn.ReLU()]
        features = width
    return [*layers, skip_init(nn.Linear, features, out)]


class _Transposed(nn.Module):
    """(N, a, b) -> (N, b, a)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)
