"""Random crops and flips for whole batches, each a pure function of the sample's id."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.data.sampling import uniform

_CROP_ROW, _CROP_COLUMN, _FLIP = range(1, 4)


@dataclass(frozen=True)
class Augmentation:
    """Crop and flip, in this order, on uint8 images before they are normalized.

    The result for a sample depends on `(seed, epoch, number)` only: not on the batch it is in, the
    order of the batch, or the rank. The default changes nothing.
    """

    pad: int = 0
    """Zero pixels added on every side before a random crop of the old size; 0: no crop."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""

    def __call__(self, images: Tensor, ids: Tensor, seed: int, epoch: int) -> Tensor:
        """Augment `images`, uint8 `(B, C, H, W)`, of numbers `ids`, int64 `(B,)`, on one device."""

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
        return images
