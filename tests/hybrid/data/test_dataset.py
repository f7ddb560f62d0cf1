"""A data set checks its labels and makes normalized batches."""

import pytest
import torch

from hybrid.data import Augmentation, Dataset, dataset

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def make(**changes):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, 3, 7, 5), dtype=torch.uint8, generator=generator)
    parts = {"labels": torch.arange(20) % 4, "classes": 4, "mean": MEAN, "std": STD}
    return Dataset(**({"images": images} | parts | changes))


@pytest.mark.parametrize("changes", [{"classes": 3}, {"labels": torch.full((20,), -1)}])
def test_a_label_of_no_class_is_refused(changes):
    with pytest.raises(ValueError, match=r"labels lie in (0\.\.3|-1\.\.-1), outside 0\.\."):
        make(**changes)


def test_a_batch_is_normalized_by_channel():
    data, ids = make(), torch.tensor([3, 0, 19])
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
    expected = (data.images[ids] / 255 - mean) / std
    batch = data.batch(ids, 0, 0)
    assert batch.dtype == torch.float32
    assert batch.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(batch, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("images", "labels"), [(False, True), (True, False), (False, False)])
def test_only_drops_the_memory_and_keeps_the_shapes(images, labels):
    data = make()
    part = data.only(images=images, labels=labels)
    for kept, old, new in ((images, data.images, part.images), (labels, data.labels, part.labels)):
        assert new.shape == old.shape
        assert new.dtype == old.dtype
        assert (new is old) if kept else new.untyped_storage().nbytes() == old.element_size()


def test_images_that_a_gpu_holds_are_made_into_batches_there(monkeypatch):
    data, other = make(augmentation=Augmentation(pad=2, flip=True)), torch.device("meta")
    here = data.on(other, images=True, labels=False)
    batch = here.batch(torch.tensor([3, 0, 19]), 0, 1)
    assert batch.device == other
    assert batch.shape == (3, 3, 7, 5)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert here.labels is data.labels
    assert here.fingerprint() == data.fingerprint()
    assert data.on(torch.device("cpu"), images=True, labels=True) is data
    monkeypatch.setattr(dataset, "MOST_ON_GPU", data.images.nbytes - 1)
    assert data.on(other, images=True, labels=False) is data


@pytest.mark.gpu
def test_a_gpu_augments_by_the_same_draws_to_the_same_bits():
    data, ids = make(augmentation=Augmentation(pad=2, flip=True)), torch.arange(200) % 53
    here = data.on(torch.device("cuda"), images=True, labels=True)
    assert torch.equal(here.batch(ids, 3, 1).cpu(), data.batch(ids, 3, 1))
    assert torch.equal(here.targets(ids).cpu(), data.targets(ids))
