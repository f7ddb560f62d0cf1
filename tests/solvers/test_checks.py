"""The name that is meant by one that is none."""

import pytest

from hybrid.solvers.acting import nearest


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("DDG", ["ddg", "fdg"], "ddg"),
        ("AugmentedLagrangian", ["penalty", "augmented-lagrangian"], "augmented-lagrangian"),
        ("resnett20", ["resnet20", "resnet56"], "resnet20"),
        ("xyz", ["ddg", "fdg"], None),
        ("", ["ddg"], None),
    ],
)
def test_the_nearest_name_is_the_most_alike_one(word, known, meant):
    assert nearest(word, known) == meant


def test_it_may_be_asked_to_be_more_alike():
    assert nearest("dgx", ["ddg"], 0.6) == "ddg"
    assert nearest("dgx", ["ddg"], 0.7) is None
