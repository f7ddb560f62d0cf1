"""Small causal models with adapters of peft's: whole, in blocks, and on ranks."""

from __future__ import annotations

from typing import Any

import torch
from hugging_face import GPT2, TEXT, VOCABULARY
from torch import Tensor, nn
from world import launched
from zoo_packages import package

from hybrid import Trainer, split
from tests.hybrid.training.pretrained_program import digests

SAMPLES, LENGTH, BATCH, LR = 12, 6, 4, 0.1
IDS = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
DRY = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


def base(kind: str, seed: int = 0, layers: int = 2) -> Any:
    """A Llama, or a GPT-2 whose embedding is its head, too, in float64 and without dropout."""
    tf = package("transformers")
    tf.logging.set_verbosity_error()
    torch.manual_seed(seed)
    if kind == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**{**TEXT, "num_hidden_layers": layers})).double()
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**GPT2, **DRY, "n_layer": layers})).double()


def adapted(kind: str, seed: int = 0, layers: int = 2, **settings: Any) -> Any:
    """A base with adapters that are not zero, so every one of them has a gradient."""
    peft = package("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, **settings)
    model = peft.get_peft_model(base(kind, seed, layers), config).double()
    random = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.2, generator=random)
    return model


def llama() -> Any:
    return adapted("llama")


def other_llama() -> Any:
    """Adapters on another base."""
    return adapted("llama", seed=7)


def loss(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def data() -> Any:
    return (IDS, IDS), (IDS, IDS)


def trainer(model: Any, blocks: int, solver: Any, epochs: int = 1, **given: Any) -> Trainer:
    """Plain SGD at a constant rate."""
    options: dict[str, Any] = {
        "train": {"epochs": epochs, "batch_size": BATCH, "threads": 1},
        "optimizer": {"name": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_epochs": 0},
        "loss": loss,
        "metrics": {},
        "quiet": True,
    }
    return Trainer(split(model, blocks, sample=IDS[:2]), solver, **{**options, **given})


def trained(model: Any, blocks: int, solver: Any, **given: Any) -> Any:
    """The model after a training."""
    trainer(model, blocks, solver, **given).fit(*data())
    return model


def on_ranks(comm: Any, kind: str, solver: Any) -> dict[str, str]:
    """The checksums of a rank's own tensors."""
    with launched(comm):
        made = trainer(adapted(kind), comm.size, solver)
        made.fit(*data())
    module = made.blocks.module(comm.rank)
    named = {module.global_name(n): x for n, x in module.state_dict().items()}
    return digests(named)
