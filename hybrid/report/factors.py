"""Which test images and classes each factor of a factorization layer responds to."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid.data import Dataset
from hybrid.models import mode, units
from hybrid.solvers.layers.projection import Factorization

IMAGES = 2000
"""Test images that are passed through a layer, spread over the data set."""
STRONGEST = 8
"""Images that the page shows for each factor."""
SHOWN = 64
"""Factors that the page shows for a layer."""
SILENT = 1e-6
"""A factor whose largest mean code is at most this share of the layer's largest is unused."""
_BATCH = 250


@dataclass
class Factor:
    """One factor and the images it responds to most, strongest first."""

    number: int
    """Its row of the dictionary."""
    images: Tensor
    """uint8 `(n, C, H, W)`, n <= STRONGEST."""
    codes: Tensor | None
    """Code maps of those images `(n, h, w)`; None where a code is one number an image."""


@dataclass
class Responses:
    r"""How a layer with codes M (N, rank, h, w) or (N, rank) responds to N test images.

    With m = the mean of M over h, w:   share[f, c] = mean of m[i, f] over the images i of class c,
    divided by its sum over the classes.
    """

    layer: str
    images: int
    shares: Tensor
    """`(rank, classes)`; rows sum to 1, or to 0 for a factor that is unused."""
    factors: list[Factor]
    """The used ones, at most SHOWN with the largest mean code, by the class they respond to."""
    unused: list[int]
    left_out: int
    """Used factors beyond SHOWN."""

    def top_classes(self, number: int) -> list[tuple[int, float]]:
        """The two classes a factor responds to most, and their shares."""
        values, classes = self.shares[number].topk(min(2, self.shares.shape[1]))
        return list(zip(classes.tolist(), values.tolist(), strict=True))


def layers(model: nn.Sequential) -> list[tuple[str, Factorization]]:
    """The factorization layers among the units' modules, with their names, in running order."""
    return [(name, part) for name, part in _parts(model) if isinstance(part, Factorization)]


def has_dictionary(tensors: dict[str, Tensor]) -> bool:
    """Whether a state dict has a dictionary, as that of a factorization layer has."""
    return any(name.rpartition(".")[2] == "dictionary" for name in tensors)


@torch.no_grad()
def responses(
    model: nn.Sequential, name: str, layer: Factorization, test: Dataset, limit: int = IMAGES
) -> Responses:
    """Pass up to `limit` test images through the network up to `layer`, in evaluation mode."""
    number = min(limit, len(test))
    ids = torch.arange(number) * len(test) // number
    with mode(model, training=False):
        codes = (_codes(model, layer, test, part) for part in ids.split(_BATCH))
        means = torch.cat([M.flatten(2).mean(2) if M.dim() > 2 else M for M in codes])
        peaks = means.amax(0)
        used = peaks > SILENT * peaks.max()
        sums = torch.zeros(test.classes, len(peaks)).index_add_(0, test.labels[ids], means)
        sums /= test.labels[ids].bincount(minlength=test.classes).clamp_min(1)[:, None]
        shares = (sums / sums.sum(0).clamp_min(torch.finfo().tiny)).T
        shares[~used] = 0
        strong = (means.mean(0) * used).argsort(descending=True, stable=True)
        shown = strong[: min(SHOWN, int(used.sum()))].tolist()
        by_class = sorted(shown, key=lambda f: (int(shares[f].argmax()), -float(shares[f].max())))
        chosen = {}
        for f in by_class:
            values, places = means[:, f].topk(min(STRONGEST, number))
            chosen[f] = ids[places[values > SILENT * peaks.max()]]
        factors = _factors(model, layer, test, chosen) if chosen else []
    unused = (~used).nonzero().flatten().tolist()
    return Responses(name, number, shares, factors, unused, int(used.sum()) - len(factors))


def _factors(
    model: nn.Sequential, layer: Factorization, test: Dataset, chosen: dict[int, Tensor]
) -> list[Factor]:
    """The factors with their chosen images; each image passes through the network once."""
    ids = torch.cat(list(chosen.values())).unique()
    M = torch.cat([_codes(model, layer, test, part) for part in ids.split(_BATCH)])
    mapped = M.dim() > 2 and M[0, 0].numel() > 1
    return [
        Factor(f, test.images[own], M[torch.searchsorted(ids, own), f] if mapped else None)
        for f, own in chosen.items()
    ]


def _codes(model: nn.Sequential, layer: Factorization, test: Dataset, ids: Tensor) -> Tensor:
    """M of the images `ids`, on the CPU."""
    x = test.batch(ids, seed=0, epoch=0, augment=False).to(layer.dictionary.device)
    for _, part in _parts(model):
        if part is layer:
            break
        x = part(x)
    return layer.codes(x).float().cpu()


def _parts(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    return [part for unit in units(model) for part in unit.parts.items()]
