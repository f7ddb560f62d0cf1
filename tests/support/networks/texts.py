"""Tiny language models of transformers, sentences for them, and their plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from zoo_packages import package

WORDS, LONGEST = 40, 24


def network(kind: str, double: bool = True, dropout: float = 0.0) -> nn.Module:
    """A model of two layers by the name of its class; a GPT-2 has no dropout."""
    transformers = package("transformers")
    torch.manual_seed(0)
    none = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    if kind.startswith("GPT2"):
        none |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LONGEST, n_embd=16, n_layer=2, n_head=2, **none
        )
    else:
        config = transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LONGEST,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=3,
        )
    model: Any = getattr(transformers, kind)(config)
    if "LMHead" in kind:
        model.loss_function = causal_loss
    made: nn.Module = model.double() if double else model
    return made


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """That of transformers, which computes it in float32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sentences(kind: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Items of input_ids and labels: a class, one for each word of which some are left out, or the
    words themselves."""
    random = torch.Generator().manual_seed(1)
    items = []
    for length in lengths:
        words = torch.randint(1, WORDS, (length,), generator=random)
        labels = torch.randint(3, (length,), generator=random)
        labels[torch.rand(length, generator=random) < 0.3] = -100
        target: Any = words if "LM" in kind else labels
        if "Sequence" in kind:
            target = int(words[0]) % 3
        items.append({"input_ids": words, "labels": target})
    return items


def collate(items: list[dict[str, Any]], length: int | None = None) -> dict[str, Tensor]:
    """Padded to the longest or to a length, with a mask; labels by -100."""
    words = [item["input_ids"] for item in items]
    labels = [item["labels"] for item in items]
    padded = {
        "input_ids": pad_sequence(words, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in words], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100)
        if isinstance(labels[0], Tensor)
        else torch.tensor(labels),
    }
    more = 0 if length is None else length - padded["input_ids"].shape[1]
    if not more:
        return padded
    return {
        key: nn.functional.pad(x, (0, more), value=-100 if key == "labels" else 0)
        if x.dim() > 1
        else x
        for key, x in padded.items()
    }


def plain_loop(
    model: nn.Module, items: Any, batches: Sequence[Tensor], make: Any = collate, lr: float = 0.1
) -> dict[str, Tensor]:
    """The parameters after a step of SGD for each mini-batch of numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for ids in batches:
        optimizer.zero_grad()
        model(**make([items[i] for i in ids.tolist()])).loss.backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}
