"""Small models of transformers, trained from weights in files: whole, and each rank its share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from world import launched
from zoo_packages import package

from hybrid import Trainer, split, without_weights
from hybrid.networks.local_init import LARGE
from hybrid.solvers import Backprop

WIDTH, LENGTH, VOCABULARY, SAMPLES = 64, 8, 300, 8
IDS = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
TARGETS = {"bert": torch.arange(SAMPLES) % 3, "gpt2": IDS, "tied": IDS}


def make(kind: str) -> Any:
    """A BERT that tells three classes, or a GPT-2 whose embedding may be its head, too."""
    tf = package("transformers")
    torch.manual_seed(0)
    if kind == "bert":
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 4 * WIDTH}
        shape |= {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "max_position_embeddings": 16}
        return tf.BertForSequenceClassification(tf.BertConfig(**shape, num_labels=3)).eval()
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    shape = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16, **ends}
    tied = kind == "tied"
    config = tf.GPT2Config(vocab_size=VOCABULARY, tie_word_embeddings=tied, **shape)
    return tf.GPT2LMHeadModel(config).eval()


def bert() -> Any:
    return make("bert")


def gpt2() -> Any:
    return make("gpt2")


def tied() -> Any:
    return make("tied")


def frozen() -> Any:
    """A GPT-2 whose embedding, and with it its head, is not trained."""
    model = make("tied")
    model.lm_head.weight.requires_grad_(False)
    return model


def loss(output: Any, targets: Tensor) -> Tensor:
    logits = output["logits"] if isinstance(output, Mapping) else output
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Items(torch.utils.data.Dataset[Any]):
    """Inputs by name, and targets."""

    def __init__(self, kind: str) -> None:
        self.targets = TARGETS[kind]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return {name: x[i] for name, x in INPUTS.items()}, self.targets[i]


def data() -> Any:
    return Items("gpt2"), Items("gpt2")


def trainer(
    kind: str, blocks: int, weights: Path | None = None, model: Any = None, **given: Any
) -> Trainer:
    """Of a model that has its weights, or of one without that finds them in a folder."""
    with nullcontext() if weights is None else without_weights():
        model = model or make(kind)
    train = {"epochs": 1, "batch_size": 4, "threads": 1}
    cut = split(model, blocks, sample=INPUTS, weights=weights)
    lr = {"lr": 0.05}
    return Trainer(
        cut, Backprop(), loss=loss, metrics={}, train=train, optimizer=lr, quiet=True, **given
    )


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksums by the names in the whole model."""
    return {
        name: hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, x in tensors.items()
    }


def on_ranks(comm: Any, kind: str, weights: Path, out: Path) -> tuple[dict[str, str], int, int]:
    """(checksums of a rank's own tensors, numbers of large parameters in memory, of its own)."""
    with launched(comm):
        made = trainer(kind, comm.size, weights, out=out)
        made.fit(Items(kind))
    parameters = {p.untyped_storage().data_ptr(): p for p in made.blocks.model.parameters()}
    held = sum(p.untyped_storage().nbytes() for p in parameters.values() if p.nbytes >= LARGE)
    module = made.blocks.module(comm.rank)
    own = sum(p.nbytes for p in module.parameters() if p.nbytes >= LARGE)
    return digests({module.global_name(n): x for n, x in module.state_dict().items()}), held, own
