"""GPT-2's decoder as a chain of units, for texts as bytes or any other tokens."""

from collections import OrderedDict
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.networks.units import Chain

HEAD_WIDTH = 64
STD = 0.02
"""Of the weights at the start."""


class Embedding(nn.Module):
    """Tokens (N, T) -> (N, T, width): a vector of each token, and one of its position."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.tokens(tokens) + self.positions(positions)
        return out


class DecoderLayer(nn.Module):
    """x + A(LN(x)), then x + F(LN(x)): (N, T, width) -> (N, T, width).

    A is attention to itself and earlier positions, F a perceptron of 4 width hidden units, GELU.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_proj = nn.Linear(width, width)
        self.mlp_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, HEAD_WIDTH))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp_proj(F.gelu(self.mlp_fc(self.mlp_norm(x))))
        return out


class ByClass(nn.Module):
    """(N, T, classes) -> (N, classes, T), as torch's cross-entropy takes logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def gpt(layers: int, width: int, vocabulary: int = 256, length: int = 256) -> Chain:
    """GPT-2's decoder: tokens (N, T), T <= length, to next-token logits (N, vocabulary, T).

    Learned positions, pre-normalization, weights from N(0, 0.02^2) and those that end a branch from
    N(0, 0.02^2 / (2 layers)) (Radford et al. 2019, section 2.3); no dropout, an output layer of its
    own. Raises `ValueError` for layers < 1, a width that is no multiple of 64, vocabulary < 2,
    length < 2.
    """
    if layers < 1 or width < HEAD_WIDTH or width % HEAD_WIDTH:
        raise ValueError(
            f"gpt has no {layers} layers of width {width}: take 1 layer or more, and a multiple of "
            f"{HEAD_WIDTH}, the width of a head"
        )
    if vocabulary < 2 or length < 2:
        raise ValueError(f"gpt has {vocabulary} tokens and texts of {length}: take 2 or more")
    stack = nn.Sequential(*(DecoderLayer(width) for _ in range(layers)))
    modules = OrderedDict[str, nn.Module](
        embedding=Embedding(vocabulary, length, width),
        layers=stack,
        norm=nn.LayerNorm(width),
        output=nn.Linear(width, vocabulary, bias=False),
        by_class=ByClass(),
    )
    units = {
        "embedding": ("embedding",),
        "layers": ("layers",),
        "head": ("norm", "output", "by_class"),
    }
    chain = Chain(modules, units, (length,), vocabulary)
    for name, module in chain.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            ends_branch = name.endswith("_proj")
            nn.init.normal_(module.weight, std=STD / sqrt(2 * layers) if ends_branch else STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return chain
