"""16 bits, graphs and kernels as settings of a run."""

import pytest
import torch
from trainings import Data, digits, refused, trainer

from solvers import AugmentedLagrangian


@pytest.fixture(scope="module")
def many() -> Data:
    return digits()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_16_bits_train(precision, many):
    train = {"epochs": 3, "precision": precision}
    made = trainer(AugmentedLagrangian(), window=4, model="plain", train=train)
    assert made.fit(*many)["test_accuracy"] > 0.8


def test_the_summary_says_who_computed():
    summary = trainer(AugmentedLagrangian(), train={"device": "cpu"}).fit(*digits(2))
    assert summary["kernels"] == "torch"
    assert summary["gpu_memory_bytes"] == [0, 0]


@pytest.mark.parametrize(
    ("train", "rounds", "said"),
    [
        ({"graphs": True}, {"window": 4}, "train.graphs is True, but there is no GPU"),
        ({"kernels": "cupy"}, {"window": 4}, "no GPU"),
        ({"precision": "float16"}, {"fill": True}, "choose bfloat16, or give a --window"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_had_here_is_refused(train, rounds, said, many):
    assert said in refused(trainer(AugmentedLagrangian(), train=train, **rounds), many)
