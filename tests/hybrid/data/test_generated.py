"""The data sets without files are fixed, balanced and learnable."""

import pytest
import torch

from hybrid.data.sources import CATALOG, Cifar

GENERATED = {name: made for name, (_, made) in CATALOG.items() if not isinstance(made, Cifar)}


@pytest.fixture(scope="module")
def halves():
    return {name: make() for name, make in GENERATED.items()}


@pytest.mark.parametrize(
    ("name", "lengths", "shape"),
    [("digits", (1437, 360), (1, 8, 8)), ("synthetic", (50_000, 10_000), (3, 32, 32))],
)
def test_the_halves_have_their_sizes(halves, name, lengths, shape):
    train, test = halves[name]
    assert (len(train), len(test)) == lengths
    assert (train.shape, train.classes) == (shape, 10)
    assert int(train.images.max()) >= 254


def test_every_digit_image_of_scikit_learn_is_in_one_half(halves):
    from sklearn.datasets import load_digits

    joined = torch.cat([half.images for half in halves["digits"]]).flatten(1)
    raw = torch.from_numpy(load_digits().images).flatten(1) * (255 / 16)
    ours, theirs = (sorted(x.round().int().tolist()) for x in (joined, raw))
    assert ours == theirs


@pytest.mark.parametrize("name", GENERATED)
def test_the_constants_normalize_the_training_images(halves, name):
    train = halves[name][0]
    batch = train.batch(torch.arange(min(len(train), 5000)), 0, 0)
    assert float(batch.mean((0, 2, 3)).abs().max()) < 0.02
    assert float((batch.std((0, 2, 3)) - 1).abs().max()) < 0.02
