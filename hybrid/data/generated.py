"""Data sets that need no download: digits, and a synthetic one for measurements."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hybrid.data.dataset import Dataset
from hybrid.data.sampling import uniform

# means and standard deviations are those of the training halves
_DIGITS_MEAN, _DIGITS_STD = (0.3056,), (0.3761,)
_DIGITS = Path(__file__).with_name("digits.safetensors")
_DIGITS_TEST = 360

_SYNTHETIC_POOL = 2000
_SYNTHETIC_MEAN, _SYNTHETIC_STD = (0.484, 0.502, 0.498), (0.182, 0.178, 0.182)


def digits() -> tuple[Dataset, Dataset]:
    """1,797 handwritten digits, 1x8x8: 1,437 to train on and 360 to test.

    The test half of E. Alpaydin and C. Kaynak's Optical Recognition of Handwritten Digits (UCI
    Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0), 0 to 16 a pixel, as in
    scikit-learn. The split is stratified and always the same, whatever the seed of the run.
    """
    raw = load_file(_DIGITS)
    images = (raw["images"].double() * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    labels = raw["labels"].long()
    test = _stratified(labels, _DIGITS_TEST)

    def part(chosen: Tensor) -> Dataset:
        return Dataset(images[chosen], labels[chosen], 10, _DIGITS_MEAN, _DIGITS_STD)

    return part(~test), part(test)


def _stratified(labels: Tensor, count: int) -> Tensor:
    """A mask of `count` samples, bool `(N,)`, spread evenly over the labels."""
    n = len(labels)
    # labels first, a random order within each: evenly spaced picks then keep the proportions
    order = (labels + uniform(0, 0, torch.arange(n), 0)).argsort()
    mask = torch.zeros(n, dtype=torch.bool)
    mask[order[torch.arange(count) * n // count]] = True
    return mask


def synthetic() -> tuple[Dataset, Dataset]:
    """50,000 and 10,000 images in the shape of CIFAR-10: noisy versions of ten patterns.

    For measurements of time only: each half repeats a pool of 2,000 different images.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(10, 3, 4, 4, generator=generator)
    patterns = F.interpolate(coarse, size=(32, 32), mode="bilinear") * 127 + 64
    return _make_noisy_images(patterns, 50_000, generator), _make_noisy_images(
        patterns, 10_000, generator
    )


def _make_noisy_images(patterns: Tensor, n: int, generator: torch.Generator) -> Dataset:
    labels = torch.arange(_SYNTHETIC_POOL) % len(patterns)
    pool = patterns[labels]
    noise = torch.rand(pool.shape, generator=generator) * 128 - 64
    images, copies = (pool + noise).to(torch.uint8), n // _SYNTHETIC_POOL
    parts = images.repeat(copies, 1, 1, 1), labels.repeat(copies)
    return Dataset(*parts, len(patterns), _SYNTHETIC_MEAN, _SYNTHETIC_STD)
