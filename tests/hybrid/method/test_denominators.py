"""What Hugging Face's losses are divided by is known by the names of their classes."""

import pytest
import torch
from answers import refusal
from torch import nn
from trainings import trainer_of
from zoo_packages import installed, package

from hybrid.method import objectives
from hybrid.method.objectives import count_of_transformers
from hybrid.solvers import Backprop
from hybrid.solvers.objective import CountOf

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")

N = 16
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 20,
    "intermediate_size": 16,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def network(kind: str) -> nn.Module:
    transformers = package("transformers")

    torch.manual_seed(0)
    base = kind.removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
    if kind == "SegformerForSemanticSegmentation":
        sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8}
        heads = {"num_attention_heads": [1, 2, 4, 8]}
        config = transformers.SegformerConfig(num_labels=3, **sizes, **heads)
        config.semantic_loss_ignore_index = 255
    else:
        config = getattr(transformers, f"{base}Config")(**TEXT)
    model: nn.Module = getattr(transformers, kind)(config)
    return model


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    """The first ones are complete, and of others most is left out."""
    random = torch.Generator().manual_seed(0)
    if "Segformer" in kind:
        labels = torch.randint(3, (N, 32, 32), generator=random)
        labels[2::3, 4:] = 255
        return [
            {"pixel_values": torch.randn(3, 32, 32, generator=random), "labels": y} for y in labels
        ]
    ids = torch.randint(20, (N, 9), generator=random)
    labels = ids.clone()
    labels[2::3, 2:] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("Gemma2ForCausalLM", CountOf("shifted labels")),
        pytest.param("LlamaForCausalLM", CountOf("shifted labels"), marks=pytest.mark.slow),
        pytest.param("BertForMaskedLM", CountOf("labels"), marks=pytest.mark.slow),
        ("SegformerForSemanticSegmentation", CountOf("labels", 255)),
    ],
)
def test_a_loss_in_parts_is_that_of_the_undivided_mini_batch(
    kind: str, count: CountOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, items = network(kind), samples(kind)
    assert count_of_transformers(model) == count
    sample = {name: torch.stack([item[name] for item in items[:2]]) for name in items[0]}

    def fit() -> object:
        train = {"epochs": 1, "batch_size": 8}
        solver = Backprop(micro_batches=2)
        made = trainer_of(network(kind), solver, 2, sample=sample, metrics={}, train=train)
        return made.fit(items)["proof"]

    assert fit() == "passed"
    monkeypatch.setattr(objectives, "count_of_transformers", lambda model: None)
    assert refusal(fit).startswith("the run would train another network than the one that was")


def test_other_networks_are_means_over_samples_until_it_is_said_otherwise() -> None:
    transformers = package("transformers")

    class GPT2LMHeadModel(nn.Module):
        """A name alone says nothing."""

    config = transformers.BertConfig(**TEXT)
    assert count_of_transformers(GPT2LMHeadModel()) is None
    assert count_of_transformers(transformers.BertForSequenceClassification(config)) is None
