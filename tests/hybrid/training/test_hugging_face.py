"""Networks of transformers as they are: the bits of a plain loop, dropout included."""

import pytest
import torch
from hugging_face import CASES, Rows, data_of, plain_loop, trainer_of
from trainings import assert_same
from zoo_packages import installed

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param("BERT", 4, marks=pytest.mark.slow),
        ("GPT-2, tied", 4),
        pytest.param("Llama", 2, marks=pytest.mark.slow),
        pytest.param("T5, tied", 2, marks=pytest.mark.slow),
    ],
)
def test_serial_training_has_the_bits_of_a_plain_loop(name, blocks):
    case = CASES[name]
    trainer = trainer_of(case, blocks, "backprop")
    trainer.fit(Rows(*data_of(case)))
    assert len(trainer.blocks) == blocks
    assert_same(dict(trainer.blocks.model.state_dict()), plain_loop(case))


@pytest.mark.slow
def test_draws_between_calls_do_not_depend_on_the_cuts():
    """BART drops activations in the code of its encoder and decoder, where a cut may lie."""
    case, weights = CASES["BART, tied"], []
    for blocks in (1, 3):
        trainer = trainer_of(case, blocks, "backprop")
        trainer.fit(Rows(*data_of(case)))
        weights.append(dict(trainer.blocks.model.state_dict()))
    assert_same(*weights)


def test_a_weight_of_two_blocks_stays_one_in_a_delayed_pipeline():
    case = CASES["GPT-2, tied"]
    trainer = trainer_of(case, 4, "ddg")
    before = trainer.blocks.model.lm_head.weight.detach().clone()
    trainer.fit(Rows(*data_of(case)))
    last = dict(trainer.blocks.module(3).named_parameters())["0.lm_head.weight"]
    first = trainer.blocks.model.transformer.wte.weight
    assert last is not first
    assert torch.equal(last, first)
    assert not torch.equal(first, before)
