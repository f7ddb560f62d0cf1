"""Augmentation crops and flips, for each sample by its id alone."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data import Augmentation

IMAGES = torch.randint(
    1, 256, (40, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
IDS = torch.arange(40)


@given(
    st.builds(Augmentation, pad=st.integers(0, 4), flip=st.booleans()),
    st.lists(st.integers(0, 39), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.integers(0, 99),
)
def test_a_sample_is_bitwise_the_same_in_any_batch(augmentation, chosen, seed, epoch):
    ids = torch.tensor(chosen)
    together = augmentation(IMAGES[ids], ids, seed, epoch)
    assert together.dtype == torch.uint8
    for place, i in enumerate(chosen):
        one = torch.tensor([i])
        assert torch.equal(augmentation(IMAGES[one], one, seed, epoch)[0], together[place])


def test_a_crop_is_a_window_of_the_padded_image_and_every_offset_occurs():
    images = IMAGES.repeat(10, 1, 1, 1)
    out = Augmentation(pad=2)(images, torch.arange(len(images)), 0, 0)
    padded = F.pad(images, (2, 2, 2, 2))
    windows = [padded[:, :, y : y + 8, x : x + 6] for y in range(5) for x in range(5)]
    same = torch.stack([(out == window).flatten(1).all(1) for window in windows])
    assert same.any(0).all()
    assert same.any(1).all()


def test_about_half_of_the_images_are_mirrored_and_the_others_kept():
    images = IMAGES[:1].expand(2000, -1, -1, -1)
    out = Augmentation(flip=True)(images, torch.arange(2000), 0, 0)
    mirrored = (out == images.flip(3)).flatten(1).all(1)
    kept = (out == images).flatten(1).all(1)
    assert bool((mirrored ^ kept).all())
    assert 900 < int(mirrored.sum()) < 1100
