"""The GPT against its definition, transformers' GPT-2 and its published size."""

import pytest
import torch
from answers import refusal
from zoo_packages import installed, package

from hybrid.networks.models import build, gpt
from hybrid.networks.units import units


def tokens(count, length, vocabulary=256, seed=0):
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def test_gpt_2_has_its_published_parameters_and_an_output_layer_beside():
    with torch.device("meta"):
        network = gpt(12, 768, vocabulary=50257, length=1024)
    output = network.output.weight.numel()
    assert sum(p.numel() for p in network.parameters()) == 124_439_808 + output
    assert [unit.name for unit in units(network)] == [
        "embedding",
        *(f"layers.{i}" for i in range(12)),
        "head",
    ]


def test_a_logit_depends_on_tokens_up_to_its_own_alone():
    torch.manual_seed(0)
    network = gpt(2, 64, length=16).double()
    x = tokens(1, 16)
    changed = x.clone()
    changed[0, 9] += 1
    same = network(x) == network(changed)
    assert same[..., :9].all()
    assert not same[..., 9:].any(dim=1).all(dim=1).any()


def attended(x, layer):
    """Softmax over positions up to each, head by head, in loops."""
    q, k, v = (layer.qkv(x) @ torch.eye(192).double()).split(64, dim=-1)
    out = torch.zeros_like(x)
    for n in range(len(x)):
        for t in range(x.shape[1]):
            weights = torch.stack([q[n, t] @ k[n, s] / 8 for s in range(t + 1)]).softmax(0)
            out[n, t] = sum(w * v[n, s] for s, w in enumerate(weights))
    return layer.attn_proj(out)


def test_a_layer_is_what_its_docstring_says():
    torch.manual_seed(1)
    layer = gpt(1, 64).double().layers[0]
    x = torch.randn(2, 5, 64).double()
    y = x + attended(layer.attn_norm(x), layer)
    hidden = layer.mlp_fc(layer.mlp_norm(y))
    gelu = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    assert torch.allclose(layer(x), y + layer.mlp_proj(gelu), atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(not installed("transformers"), reason="transformers is not installed")
def test_with_its_weights_it_computes_what_transformers_gpt_2_does():
    transformers = package("transformers")
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=24,
        n_embd=128,
        n_layer=3,
        n_head=2,
        activation_function="gelu",
        tie_word_embeddings=False,
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ours = gpt(3, 128, vocabulary=97, length=24).double()
    names = {
        "wte": "embedding.tokens",
        "wpe": "embedding.positions",
        "h": "layers",
        "ln_1": "attn_norm",
        "ln_2": "mlp_norm",
        "attn.c_attn": "qkv",
        "attn.c_proj": "attn_proj",
        "mlp.c_fc": "mlp_fc",
        "mlp.c_proj": "mlp_proj",
        "ln_f": "norm",
        "lm_head": "output",
    }
    state = {}
    for name, tensor in theirs.state_dict().items():
        renamed = f".{name.removeprefix('transformer.')}"
        for old, new in names.items():
            renamed = renamed.replace(f".{old}.", f".{new}.")
        transposed = "c_" in name and tensor.dim() == 2  # theirs are written as 1 x 1 convolutions
        state[renamed[1:]] = tensor.T if transposed else tensor
    ours.load_state_dict(state)
    x = tokens(2, 24, vocabulary=97)
    with torch.no_grad():
        assert torch.allclose(ours(x).transpose(1, 2), theirs(x).logits, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (
            "gpt-2-100",
            {"length": 16},
            "2 layers of width 100: take 1 layer or more, and a multiple of 64",
        ),
        ("gpt-0-64", {"length": 16}, "0 layers"),
        ("gpt-2-64", {"length": 1}, "texts of 1: take 2 or more"),
        (
            "gpt-2-64",
            {"channels": 3, "image_size": 32},
            "gpt-2-64 reads texts, and the data are images",
        ),
        ("resnet20", {"length": 16}, "resnet20 reads images, and the data are texts"),
        ("gpt-9999-64", {"length": 16}, "depth 9999; it must be at most 2000"),
        ("gpt-12-99968", {"length": 16}, "GB of memory: take a smaller width"),
        ("gpt2", {"length": 16}, "unknown model 'gpt2'"),
    ],
)
def test_what_cannot_be_is_one_line(name, shape, said):
    assert said in refusal(build, name, 256, **shape)


def test_the_weights_that_end_a_branch_are_smaller_by_the_root_of_the_number_of_branches():
    torch.manual_seed(0)
    network = gpt(8, 128)
    for layer in network.layers:
        assert layer.qkv.weight.detach().std() == pytest.approx(0.02, rel=0.05)
        for last in layer.attn_proj, layer.mlp_proj:
            assert last.weight.detach().std() == pytest.approx(0.02 / 4, rel=0.05)
            assert not last.bias.any()
