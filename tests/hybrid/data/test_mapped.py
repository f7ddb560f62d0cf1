"""A user's data set as training sees it: read ahead, by keys, with a collate of one's own."""

import pytest
import torch
from misused import Items, X, Y
from samples import SAMPLES, Counted, Drawing, Listed, Rows, trained
from torch import nn
from torch.utils.data import Subset, TensorDataset
from trainings import assert_same

from hybrid.data import Mapped
from hybrid.proof.samples import CANDIDATES

FIRST = torch.arange(4)


@pytest.fixture(scope="module")
def plain():
    return trained(Mapped(Drawing(), augmented=True))


def test_a_run_with_workers_equals_one_without_bit_for_bit(plain):
    # 2 s and more, for a process begins with an import of torch
    assert_same(trained(Mapped(Drawing(), workers=2, augmented=True), blocks=2), plain)


def test_transforms_draw_anew_in_every_epoch_unless_tested():
    mapped = Mapped(Drawing(), augmented=True)
    first, second = (mapped.batch(FIRST, 0, epoch) for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(mapped.batch(FIRST, 0, 1, augment=False), first)


def test_what_is_kept_of_a_batch_cannot_be_written_to():
    mapped = Mapped(TensorDataset(X, Y))
    mapped.batch(FIRST, 0, 0).zero_()
    mapped.targets(FIRST).zero_()
    assert torch.equal(mapped.batch(FIRST, 0, 0), X[:4])
    assert torch.equal(mapped.targets(FIRST), Y[:4])


def test_rows_of_lists_and_numbers_train_a_network():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.a, self.b = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, ids, weight):
            return self.b(torch.relu(self.a(self.e(ids).mean(1))) * weight[:, None])

    def run(blocks):
        torch.manual_seed(0)
        mapped = Mapped(Rows())
        return trained(mapped, blocks=blocks, model=Words(), sample=mapped.sample(4)[0])

    inputs, targets = Mapped(Rows()).sample(2)
    assert inputs["ids"].tolist() == [[0, 1, 2], [1, 1, 2]]
    assert inputs["weight"].dtype is torch.float32
    assert targets.tolist() == [0, 1]
    assert_same(run(2), run(1))


def test_a_collate_of_ones_own_makes_the_batch():
    def padded(items):
        rows = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return rows, torch.tensor([y for _, y in items])

    data = Items(lambda i: (torch.ones(i + 1), i))
    mapped = Mapped(data, collate=padded)
    assert mapped.batch(FIRST, 0, 0).tolist() == [[1.0] * (i + 1) + [0.0] * (3 - i) for i in FIRST]
    assert mapped.targets(FIRST).tolist() == [0, 1, 2, 3]


def test_a_batch_that_is_asked_for_again_is_not_read_again():
    data = Counted()
    mapped = Mapped(data)
    data.read.clear()
    for _ in range(3):
        mapped.batch(FIRST, 0, 0)
        mapped.targets(FIRST)
    assert len(data.read) == len(FIRST)


PROBES = 8 + CANDIDATES + 8 + 2 * 8 + 2 * 2
"""Items that every rank reads to learn their form, for the proof of its run, or to compare them."""


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_rank_reads_its_own_share_alone(world, replicas, lists):
    """On 4 ranks: those of a block in the middle read nothing, nor does the last of listed targets.

    Ranks that have started train within a second.
    """
    found = world.run(4, "samples:reads_on_rank", replicas, lists)
    blocks = 4 // replicas
    share = 2 * SAMPLES // replicas
    for rank, count in enumerate(found):
        block = rank % blocks
        asks = block == 0 or (block == blocks - 1 and not lists)
        assert share * asks <= count <= share * asks + PROBES


def test_listed_targets_are_those_of_the_items():
    mapped, items = Mapped(Subset(Listed(), [5, 3, 1, 4])), Mapped(Subset(Counted(), [5, 3, 1, 4]))
    assert torch.equal(mapped.targets(FIRST + 4), items.targets(FIRST + 4))


def test_listed_targets_that_items_do_not_have_are_not_believed():
    data = Listed()
    data.targets = data.targets[::-1]
    assert torch.equal(Mapped(data).targets(FIRST), Mapped(Counted()).targets(FIRST))
