"""Random crops, flips and cutout for whole batches, each a pure function of the sample's id."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.data.sampling import uniform

_CROP_ROW, _CROP_COLUMN, _FLIP, _CUTOUT_ROW, _CUTOUT_COLUMN = range(1, 6)


@dataclass(frozen=True)
class Augmentation:
    """Crop, flip and cutout, in this order, on uint8 images before they are normalized.

    The result for a sample depends on `(seed, epoch, number)` only: not on the batch it is in, the
    order of the batch, or the rank. The default changes nothing.
    """

    pad: int = 0
    """Zero pixels added on every side before a random crop of the old size; 0: no crop."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    cutout: int = 0
    """Side in pixels of a square of zeros (black, before normalization) with a uniformly drawn
    center, clipped at the border; 0: none (DeVries and Taylor, arXiv 1708.04552)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"augmentation {name} is {value}: it must be 0 or more")

    def __call__(self, images: Tensor, ids: Tensor, seed: int, epoch: int) -> Tensor:
        """Augment `images`, uint8 `(B, C, H, W)`, of numbers `ids`, int64 `(B,)`."""
        if ids.shape != images.shape[:1]:
            raise ValueError(f"{len(images)} images but ids of shape {tuple(ids.shape)}")
        ids = ids.to(images.device)

        def draw(stream: int, choices: int) -> Tensor:
            return (uniform(seed, epoch, ids, stream) * choices).long()

        height, width = images.shape[2:]
        if self.pad:
            top, left = (draw(x, 2 * self.pad + 1) for x in (_CROP_ROW, _CROP_COLUMN))
            padded = F.pad(images, (self.pad,) * 4)
            # a view (B, C, tops, lefts, H, W) of every window: indexing copies only the chosen
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)
            images = windows[torch.arange(len(ids), device=ids.device), :, top, left]
        if self.flip:
            mirrored = draw(_FLIP, 2).to(torch.uint8)[:, None, None, None]
            # a choice by arithmetic modulo 256: exact, and several times faster than torch.where
            images = images + mirrored * (images.flip(3) - images)
        if self.cutout:
            rows = _mark_band(draw(_CUTOUT_ROW, height), self.cutout, height)
            columns = _mark_band(draw(_CUTOUT_COLUMN, width), self.cutout, width)
            hole = rows[:, None, :, None] & columns[:, None, None, :]
            images = images * ~hole
        return images


def _mark_band(center: Tensor, length: int, size: int) -> Tensor:
    """Which of `size` positions lie in the `length` around `center`: bool `(B, size)`."""
    offset = torch.arange(size, device=center.device) - (center - length // 2)[:, None]
    return (offset >= 0) & (offset < length)
