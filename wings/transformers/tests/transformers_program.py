"""Tiny models of transformers and texts with padding, for Trainer and BlockTrainer alike."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from world import launched
from zoo_packages import package

VOCABULARY, LENGTH, SAMPLES = 37, 12, 48
DROPS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": None}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}


def library() -> Any:
    transformers = package("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def make(kind: str) -> Any:
    """A causal model with float64 weights: gpt2, whose embedding is its head, llama, or lora.

    The last one is a llama with adapters of peft's, which alone are trained.
    """
    if kind == "lora":
        peft = package("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(make("llama"), config).double()
    torch.manual_seed(0)
    tf = library()
    if kind == "gpt2":
        config = tf.GPT2Config(vocab_size=VOCABULARY, eos_token_id=None, **GPT2, **DROPS)
        return tf.GPT2LMHeadModel(config).double()
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=VOCABULARY, **LLAMA)).double()


def rows(count: int = SAMPLES, seed: int = 1) -> list[dict[str, Tensor]]:
    """Texts of 3 to 12 tokens, padded to 12; padding has the label -100."""
    draws = torch.Generator().manual_seed(seed)
    texts = []
    for length in torch.randint(3, LENGTH + 1, (count,), generator=draws).tolist():
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=draws)
        mask = torch.arange(LENGTH) < length
        labels = torch.where(mask, ids, -100)
        texts.append({"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels})
    return texts


def arguments(folder: Path, **changes: Any) -> Any:
    """Two epochs of six steps: clipped, of two micro-batches each, by a schedule with warm-up.

    A loss of transformers is in float32, so Adam's epsilon is above the noise of gradients.
    """
    usual = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
    }
    return library().TrainingArguments(output_dir=str(folder), **{**usual, **changes})


def trained(
    folder: Path, kind: str = "llama", blocks: int = 0, resume: bool = False, **given: Any
) -> Any:
    """A trainer after its training: of blocks, by "backprop" if `given` has no other; 0: Trainer.

    `given` has keywords of trainers, and others of TrainingArguments.
    """
    known = ("callbacks", "compute_metrics", "compute_loss_func", "solver", "replicas", "options")
    mine = {name: given.pop(name) for name in known if name in given}
    mine |= {"train_dataset": rows(), "eval_dataset": rows(20, 7)}
    args, model = arguments(folder, **given), make(kind)
    if blocks:
        from hybrid_transformers import BlockTrainer

        trainer = BlockTrainer(model, args, **{"blocks": blocks, "solver": "backprop", **mine})
    else:
        trainer = library().Trainer(model, args, **mine)
    with redirect_stdout(StringIO()):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def right(predicted: Any) -> dict[str, float]:
    """The share of right labels, and their number, for compute_metrics."""
    logits, labels = predicted
    hits, counts = logits[:, :-1].argmax(-1) == labels[:, 1:], labels[:, 1:] != -100
    return {"right": float(hits[counts].mean()), "count": float(counts.sum())}


def on_ranks(comm: Any, folder: Path, given: dict[str, Any]) -> tuple[list[Any], dict[str, float]]:
    """The log of a rank, and what it measures after it has saved the model."""
    with launched(comm):
        trainer = trained(folder, blocks=comm.size, **given)
        trainer.save_model(str(folder / "saved"))
        with redirect_stdout(StringIO()):
            return trainer.state.log_history, trainer.evaluate()
