"""Tiny networks of transformers and others as they are, and a plain loop with the same draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._pytree import tree_leaves, tree_map
from zoo_packages import package

from hybrid import Trainer, split
from hybrid.data.sampling import epoch_order
from hybrid.solvers.layers.bundle import call_network

SAMPLES, BATCH, VOCABULARY, LENGTH = 24, 4, 41, 8
FIRST_CALL = 1 << 20
"""What is added to the number of a module's call where it draws random numbers."""
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {k: v for k, v in TEXT.items() if k not in ("vocab_size", "bos_token_id", "eos_token_id")}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}


class Case(NamedTuple):
    """A network, its inputs and targets of `SAMPLES` samples, and a loss."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    targets: Callable[[], Tensor]
    loss: Callable[[Any, Tensor], Tensor]


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length))


def padded() -> dict[str, Tensor]:
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[::3, 5:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def images(side: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": pixels(side)}


def pixels(side: int = 32) -> Tensor:
    return torch.randn(SAMPLES, 3, side, side).to(memory_format=torch.channels_last)


def kinds() -> Tensor:
    return torch.randint(2, (SAMPLES,))


def of_kinds(out: Any, targets: Tensor) -> Tensor:
    """The mean over samples, of an output or its logits."""
    return cross_entropy(getattr(out, "logits", out), targets)


def of_tokens(out: Any, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return cross_entropy(out.logits.flatten(0, 1), targets.flatten())


def of_numbers(out: Any, targets: Tensor) -> Tensor:
    """The mean square of a bounded mean of each sample's first output."""
    one = next(x for x in tree_leaves(out) if isinstance(x, Tensor))
    return mse_loss(one.flatten(1).tanh().mean(1), targets.float())


def transformer(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A class of transformers of a tiny configuration."""

    def build() -> nn.Module:
        library = package("transformers")
        library.logging.set_verbosity_error()
        model: nn.Module = getattr(library, name)(getattr(library, config)(**settings))
        return model

    return build


def classifier(name: str, **settings: Any) -> Case:
    build = transformer(f"{name}ForSequenceClassification", f"{name}Config", **settings)
    return Case(build, padded, kinds, of_kinds)


def writer(name: str, config: str, **settings: Any) -> Case:
    return Case(transformer(name, config, **settings), padded, tokens, of_tokens)


def seeing(name: str, **settings: Any) -> Case:
    build = transformer(f"{name}ForImageClassification", f"{name}Config", **settings)
    return Case(build, images, kinds, of_kinds)


def diffusion() -> nn.Module:
    model: nn.Module = package("diffusers").UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        dropout=0.1,
    )
    return model


def noisy() -> dict[str, Tensor]:
    return {"sample": pixels(8), "timestep": torch.randint(0, 100, (SAMPLES,))}


def pyramid() -> nn.Module:
    backbones = package("torchvision.models.detection.backbone_utils")
    model: nn.Module = backbones.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5
    )
    return model


GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
T5 |= {"num_heads": 2, "decoder_start_token_id": 0}
BART = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in (("layers", 2),)}
BART |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
BART |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
BART |= {"vocab_size": VOCABULARY, "d_model": 16, "pad_token_id": 1, "bos_token_id": 0}
BART |= {"eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}


def translated() -> dict[str, Tensor]:
    return {**padded(), "decoder_input_ids": tokens()}


CASES: dict[str, Case] = {
    "BERT": classifier("Bert", **TEXT),
    "BERT of tokens": writer("BertForTokenClassification", "BertConfig", num_labels=41, **TEXT),
    "BERT of masked tokens, tied": writer("BertForMaskedLM", "BertConfig", **TEXT),
    "RoBERTa": classifier("Roberta", **{**TEXT, "pad_token_id": 1}),
    "DeBERTa v2": classifier("DebertaV2", **TEXT),
    "DistilBERT": classifier(
        "DistilBert", vocab_size=VOCABULARY, dim=16, n_layers=4, n_heads=2, hidden_dim=32
    ),
    "GPT-2, tied": writer("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "GPT-NeoX": writer("GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_dropout=0.1, **TEXT),
    "Llama": writer("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, **TEXT),
    "Qwen2, tied": writer(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        **{**TEXT, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "Mixtral": writer(
        "MixtralForCausalLM",
        "MixtralConfig",
        **{**TEXT, "num_key_value_heads": 1, "num_local_experts": 2},
    ),
    "T5, tied": Case(
        transformer("T5ForConditionalGeneration", "T5Config", **T5), translated, tokens, of_tokens
    ),
    "BART, tied": Case(
        transformer("BartForConditionalGeneration", "BartConfig", **BART),
        translated,
        tokens,
        of_tokens,
    ),
    "ViT": seeing("ViT", image_size=32, patch_size=8, hidden_dropout_prob=0.1, **VISION),
    "Swin": seeing(
        "Swin", image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
        window_size=4,
    ),
    "ResNet of transformers": Case(
        transformer(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            layer_type="basic",
            **STAGES,
        ),
        lambda: images(64),  # BatchNorm has more than one pixel of a single sample
        kinds,
        of_kinds,
    ),
    "ConvNeXt": seeing("ConvNext", drop_path_rate=0.1, **STAGES),
    "diffusion U-Net": Case(diffusion, noisy, kinds, of_numbers),
    "detector's backbone": Case(pyramid, pixels, kinds, of_numbers),
}  # fmt: skip


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build()
    for p in model.parameters():
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
    return model


def data_of(case: Case) -> tuple[Any, Tensor]:
    torch.manual_seed(1)
    return case.inputs(), case.targets()


class Rows(torch.utils.data.Dataset[Any]):
    """Inputs and targets as a data set whose items are a dict, or a pair."""

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        inputs = tree_map(lambda x: x[i], self.inputs)
        if isinstance(inputs, dict):
            return {**inputs, "labels": self.targets[i]}
        return inputs, self.targets[i]


def trainer_of(case: Case, blocks: int, solver: Any, **settings: Any) -> Trainer:
    inputs, _ = data_of(case)
    sample = tree_map(lambda x: x[:2], inputs)
    options: dict[str, Any] = {
        "train": {"epochs": 1, "batch_size": BATCH, "threads": 1},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_epochs": 0},
        "loss": case.loss,
        "metrics": {},
        "quiet": True,
    }
    cut = split(model_of(case), blocks, sample=sample)
    return Trainer(cut, solver, **{**options, **settings})


def plain_loop(case: Case, steps: int = SAMPLES // BATCH) -> dict[str, Tensor]:
    """The state dict after as many steps of SGD, written without this package's trainer."""
    torch.set_num_threads(1)
    model, (inputs, targets) = model_of(case).train(), data_of(case)
    numbered = NumberedCalls(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for step, ids in enumerate(epoch_order(0, 0, SAMPLES).split(BATCH)[:steps]):
        batch = tree_map(lambda x, ids=ids: _rows(x, ids), inputs)
        optimizer.zero_grad()
        numbered.begin(step)
        case.loss(call_network(model, batch), targets[ids]).backward()
        optimizer.step()
    return dict(model.state_dict())


def _rows(x: Tensor, ids: Tensor) -> Tensor:
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return x[ids].contiguous(memory_format=layout)


DRAWS_IN_ITS_OWN_CODE = {"BART, tied"}
"""Between the calls that a cut may separate: such draws have numbers of another kind."""


class NumberedCalls:
    """Lets every call of a module draw from torch's generator as a training in blocks draws.

    The n-th call of a pass, the network's own being the 0th, has the seed of (0, 0, step, 0, n).
    """

    def __init__(self, model: nn.Module) -> None:
        self._count, self._step = 0, 0
        self._states: list[Tensor] = []
        for module in model.modules():
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def begin(self, step: int) -> None:
        """The next pass is that of a step."""
        self._count, self._step = 0, step

    def _begin(self, module: nn.Module, args: Any) -> None:
        words: Iterable[int] = (0, 0, self._step, 0, FIRST_CALL + self._count)
        (seed,) = np.random.SeedSequence([*words]).generate_state(1, np.uint64).tolist()
        self._count += 1
        self._states.append(torch.get_rng_state())
        torch.manual_seed(seed)

    def _end(self, module: nn.Module, args: Any, out: Any) -> None:
        torch.set_rng_state(self._states.pop())


def outcome(name: str, blocks: int, solver: str) -> str:
    """ "yes", or in one line what is wrong with a training."""
    case = CASES[name]
    try:
        trainer = trainer_of(case, blocks, solver)
        rows = Rows(*data_of(case))
        summary = trainer.fit(rows, rows)
    except ValueError as error:
        return str(error)
    if solver != "backprop":
        return "yes" if np.isfinite(summary["test_loss"]) else f"loss {summary['test_loss']}"
    found = trainer.blocks.model.state_dict()
    if name in DRAWS_IN_ITS_OWN_CODE:
        whole = trainer_of(case, 1, solver)
        whole.fit(rows, rows)
        expected = whole.blocks.model.state_dict()
    else:
        expected = plain_loop(case)
    others = [name for name, x in expected.items() if not torch.equal(x, found[name])]
    return f"{len(others)} tensors differ, {others[0]} first" if others else "yes"
