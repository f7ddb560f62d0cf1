"""Networks of transformers as they are: the bits of a plain loop, dropout included."""

import pytest
import torch
from hugging_face import (
    BATCH,
    CASES,
    SAMPLES,
    VOCABULARY,
    Case,
    Rows,
    data_of,
    model_of,
    plain_loop,
    trainer_of,
    transformer,
)
from torch.utils._pytree import tree_map
from trainings import assert_same
from zoo_packages import installed

from hybrid import Trainer, split
from hybrid.solvers import Backprop

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


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_network_with_caches_and_a_loss_of_its_own_trains_as_in_a_loop(blocks):
    """Whisper gives its encoder's states behind a cache, and computes its loss from labels."""
    random = torch.Generator().manual_seed(0)
    inputs = {"input_features": torch.randn(SAMPLES, 8, 20, generator=random)}
    inputs["labels"] = torch.randint(3, VOCABULARY, (SAMPLES, 6), generator=random)
    build = transformer(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **{
            f"{side}_{k}": 2
            for side in ("encoder", "decoder")
            for k in ("layers", "attention_heads")
        },
        **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
        vocab_size=VOCABULARY,
        d_model=16,
        num_mel_bins=8,
        dropout=0.0,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    case = Case(build, lambda: inputs, lambda: inputs["labels"], lambda out, _: out.loss)
    cut = split(model_of(case), blocks, sample=tree_map(lambda x: x[:2], inputs))
    options = {
        "train": {"epochs": 1, "batch_size": BATCH, "threads": 1},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_epochs": 0},
    }
    items = [tree_map(lambda x, i=i: x[i], inputs) for i in range(SAMPLES)]
    Trainer(cut, metrics={}, quiet=True, solver=Backprop(), **options).fit(items)
    assert_same(dict(cut.model.state_dict()), plain_loop(case))
