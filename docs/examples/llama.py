"""A Llama of 201 million weights and texts to train it on, for machines that cannot hold it.

hybrid train --model llama:network --data llama:texts --loss model       # on two: two-machines.md
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2304,
    num_hidden_layers=12,
    num_attention_heads=16,
    max_position_embeddings=512,
    use_cache=False,
)
LENGTH = 32


def network() -> nn.Module:
    """803 MB of weights in float32, not tied."""
    return LlamaForCausalLM(CONFIG)


def lora() -> nn.Module:
    """The same network, frozen, with adapters of rank 8 beside its attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(network(), settings)  # type: ignore[no-any-return, arg-type]


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Windows of `LENGTH` bytes of a text; a byte is a token."""

    def __init__(self, text: bytes) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index]
        return {"input_ids": window, "labels": window}


def texts() -> tuple[Texts, Texts]:
    """96 windows of Python's own sources to train on, and 8 to test on."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()[: 104 * LENGTH]
    return Texts(text[: 96 * LENGTH]), Texts(text[96 * LENGTH :])
